"""Settings that do nothing beside others: each is named in the header of the run, with the edit."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import pytest

from terrazzo.config import CONFIG_KEYS, config_from_dict, load_config
from terrazzo.engine import Offload, Plan, Precision, formats_without_messages
from terrazzo.train.preflight import check
from terrazzo.train.preflight.idle_keys import _OF_ONE_RANK, _RULES, idle_notes
from terrazzo.train.settings.plan import build_precision, precision_of_run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("raw", "keys", "said"),
    [
        ({"model": {"kind": "huggingface", "path": "x", "dim": 64, "layers": 2}}, "model.dim, model.layers do", "json"),
        ({"data": {"text_field": "body", "loss_on": "all"}}, "data.text_field, data.loss_on do", "no records"),
        ({"data": {"end_of_document": "</s>"}}, "data.end_of_document does", "data.tokenizer is 'bytes'"),
        ({"data": {"validation_source": "x", "validation_fraction": 0.1}}, "data.validation_fraction does", "remove"),
        ({"offload": {"step": "synchronous", "threads": 2}}, "offload.step, offload.threads do", "offload.optim=cpu"),
        ({"offload": {"pin": False}}, "offload.pin does", "no state is in host memory"),
        ({"offload": {"path": "/nowhere"}}, "offload.path does", "set offload.optim=nvme"),
        ({"plan": "zero3@cpu", "offload": {"depth": 2, "digest": True}}, "offload.depth, offload.digest do", "nvme"),
        ({"optimizer": {"name": "Rprop", "weight_decay": 0.2}}, "optimizer.weight_decay does", "no weight decay"),
        ({"optimizer": {"weight_decay": 0, "decay": "all"}}, "optimizer.decay does", "weight_decay is 0"),
        ({"optimizer": {"muon": {"ns_steps": 3}}}, "optimizer.muon.ns_steps does", "set optimizer.name=Muon"),
        ({"schedule": {"name": "constant", "final_fraction": 0}}, "schedule.final_fraction does", "schedule.name"),
        ({"data": {"validation_fraction": 0}, "train": {"eval_every": 5}}, "train.eval_every does", "data.validation"),
        ({"train": {"sample_tokens": 0, "sample_prompt": "a"}}, "train.sample_prompt does", "train.sample_tokens"),
        ({"checkpoint": {"keep_last": None, "keep_best": 1}}, "checkpoint.keep_best does", "checkpoint.keep_last"),
        ({"checkpoint": {"keep_best": 1, "every": 5}}, "checkpoint.keep_best does", "set train.eval_every, and"),
        ({"checkpoint": {"keep_best": 1, "every": "auto"}}, "checkpoint.keep_best does", "no step before the last is"),
        ({"checkpoint": {"keep_best": 1, "every": None}, "train": {"eval_every": 5}}, "checkpoint.keep_best", "both"),
        (
            {"checkpoint": {"keep_best": 1, "every": 5}, "train": {"eval_every": 7, "steps": 35}},
            "checkpoint.keep_best does",
            "to a multiple of it",
        ),
        ({"checkpoint": {"staging_gib": 1}}, "checkpoint.staging_gib does", "checkpoint.background=true"),
        ({"checkpoint": {"overwrite": True}}, "checkpoint.overwrite does", "checkpoint.resume=never"),
        ({"checkpoint": {"resume": "never", "cast": True}}, "checkpoint.cast does", "checkpoint.resume=if_exists"),
        ({"parallel": {"pipeline": {"chunks": 2}}}, "parallel.pipeline.chunks does", "set plan.mesh.pp"),
        ({"parallel": {"context": {"mode": "ring", "balance": "none"}}}, "parallel.context.mode, parallel.", "mesh.cp"),
        ({"parallel": {"tensor": {"sequence": False}}}, "parallel.tensor.sequence does", "set plan.mesh.tp"),
        ({"parallel": {"tensor": {"plan": {"*.q_proj": "colwise"}}}}, "parallel.tensor.plan does", "set plan.mesh.tp"),
        ({"plan": {"outer": {"delay": 1}}}, "plan.outer.delay does", "set plan.sync_every"),
        (
            {"plan": {"sync_every": 5, "outer": {"mixing": 0.1}, "mesh": {"dp_replicate": 2}}},
            "plan.outer.mixing does",
            "set plan.outer.delay",
        ),
        ({"plan": {"name": "zero0", "prefetch": 3}}, "plan.prefetch does", "plan.name=zero3"),
        ({"plan": "zero0", "precision": {"gather": "int8"}}, "precision.gather does", "plan.name=zero3"),
        ({"plan": {"mesh": {"tp": 2}}, "precision": {"quantized_reduce": "int8"}}, "precision.quan", "start more"),
        ({"plan": {"mesh": {"pp": 2}}, "precision": {"quantized_reduce": "int4"}}, "precision.quan", "start more"),
        ({"objective": {"name": "reward", "loss": "full"}}, "objective.loss does", "set objective=next_token"),
        ({"plan": {"mesh": {"pp": 2}}, "train": {"sample_prompt": "a"}}, "train.sample_prompt does", "plan.mesh.pp=1"),
        (
            {"model": {"ffn_dim": 9, "experts": {"count": 2, "ffn_dim": 8}}},
            "model.ffn_dim does",
            "remove model.experts",
        ),
        ({"guard": {"limit": 3, "spike": 8.0}}, "guard.limit does", "set guard.action=skip"),
        ({"train": {"check_replicas_every": 3}}, "train.check_replicas_every does", "no two ranks hold the same"),
        ({"launch": {"ranks": 4}}, "launch.ranks does", "2 ranks have been started"),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_a_setting_that_does_nothing_is_named_with_the_edit(raw: dict[str, Any], keys: str, said: str) -> None:
    (note,) = idle_notes(config_from_dict(raw), 2)
    assert note.startswith(f"config: {keys}") and " nothing: " in note
    assert said in note
    assert "Remove " in note


@pytest.mark.parametrize(
    "raw",
    [
        {"plan": {"name": "zero2", "prefetch": 3}},
        {"plan": "zero2", "train": {"check_replicas_every": 3}},
        {"plan": {"mesh": {"tp": 2}}, "train": {"check_replicas_every": 3}},
        {"plan": {"mesh": {"cp": 2}}, "precision": {"quantized_reduce": "int8"}},
        {"plan": {"name": "hybrid_shard", "mesh": {"dp_replicate": 2}}, "train": {"check_replicas_every": 3}},
        {"guard": {"action": "skip", "limit": 3}},
        {"launch": {"stall_s": 5}},
        {"plan": {"name": "shard_grad_op", "prefetch": 3}},
        {"plan": "zero3@cpu", "offload": {"step": "synchronous", "threads": 2, "pin": False}},
        {"train": {"activation_checkpointing": "full"}, "offload": {"activations": "cpu", "pin": False}},
        {"plan": "zero3@nvme", "offload": {"path": "x", "depth": 2, "block_mib": 1, "direct": False}},
        {"train": {"activation_checkpointing": "selective", "activation_checkpointing_ops": ["mm"]}},
        {"checkpoint": {"keep_last": 1, "keep_every": 5, "background": True, "staging_gib": 1}},
        {"checkpoint": {"keep_best": 1, "every": 5}, "train": {"eval_every": 7, "steps": 36}},
        {"checkpoint": {"keep_best": 1, "every": "auto"}, "train": {"eval_every": 7}},
        {"checkpoint": {"resume": "never", "overwrite": True}},
        {"checkpoint": {"resume": "if_exists", "overwrite": True}},
        {"launch": {"ranks": 2}},
    ],
)
def test_what_works_is_not_spoken_of(raw: dict[str, Any]) -> None:
    assert idle_notes(config_from_dict(raw), 2) == []


def test_defaults_and_examples_are_quiet() -> None:
    filled = config_from_dict({"train": {"sample_tokens": 0}}).model_dump(mode="json")
    assert idle_notes(config_from_dict(filled), 1) == []
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        config = load_config(path)
        assert idle_notes(config, config.launch.ranks or 1) == [], path.name


@pytest.mark.parametrize("plan", ["zero0", "zero3"])
def test_one_rank_is_told_once_of_messages_that_nobody_sends(plan: str) -> None:
    config = config_from_dict({"plan": plan, "precision": {"gather": "int8", "quantized_reduce": "int8"}})
    gather, reduce = idle_notes(config, 1)
    assert gather.startswith("config: precision.gather does nothing")
    assert reduce.startswith("config: precision.quantized_reduce does nothing")
    assert precision_of_run(config, 1) == Precision()
    assert precision_of_run(config, 2) == (
        build_precision(config) if plan == "zero3" else Precision(quantized_reduce="int8")
    )


def test_copies_of_experts_along_tp_are_summed() -> None:
    config = config_from_dict(
        {
            "plan": {"mesh": {"tp": 4, "ep": 2}},
            "model": {"experts": {"count": 4}},
            "precision": {"quantized_reduce": "int8"},
        }
    )
    assert idle_notes(config, 4) == []


def test_a_limit_that_nobody_keeps_is_named() -> None:
    (note,) = idle_notes(config_from_dict({"launch": {"stall_s": 5}}), 1)
    assert note.startswith("config: launch.stall_s does nothing")


REFUSED = """
    data.packing data.too_long guard.spike guard.skip_batches guard.window lora.alpha lora.bias lora.rank
    lora.target_modules model.attention.* model.experts.* model.kind model.path model.weights objective.beta
    objective.label_smoothing
    offload.activations schedule.decay_steps train.activation_checkpointing_ops
"""
"""Where one of these would do nothing, the schema or preflight refuses it."""

ALWAYS = """
    batch.* checkpoint.background checkpoint.every checkpoint.folder checkpoint.keep_last checkpoint.local.folder
    checkpoint.resume checkpoint.save_format data.cache data.chat_template data.max_bytes data.source data.tokenizer
    data.validation_source guard.action guard.memory_every guard.replay_every launch.device launch.ignore_planner
    launch.restarts launch.threads launch.timeout_s log.* objective.name offload.grad offload.optim offload.weight
    optimizer.lr optimizer.name optimizer.options plan.between plan.grad plan.mesh.* plan.name plan.optim
    plan.sync_every plan.units plan.weight
    precision.[!egq]* schedule.name schedule.warmup_steps train.activation_checkpointing train.clip
    train.compile train.seed train.steps
"""
"""These do something in every run, whatever else is set."""


def test_every_key_of_the_schema_is_judged() -> None:
    ruled = {key for rule in (*_RULES, *_OF_ONE_RANK) for key in rule.keys.split()} | {"launch.ranks"}
    unused = formats_without_messages(Plan.named("zero0"), ())
    ruled |= {f"precision.{name}" for names in unused.values() for name in names}
    ruled |= {f"offload.{name}" for names in Offload.unused_under(Plan.named("zero0")).values() for name in names}
    judged = [key for glob in f"{REFUSED} {ALWAYS}".split() for key in fnmatch.filter(CONFIG_KEYS, glob)]
    assert sorted(judged) == sorted(set(judged)), "once each"
    assert ruled.isdisjoint(judged)
    told_by_the_data = {"data.attention"}  # whether each sequence has one document
    assert ruled | {*judged} | told_by_the_data == CONFIG_KEYS.keys()


def test_the_header_begins_with_them(tmp_path: Path) -> None:
    log = {"folder": str(tmp_path / "run")}
    config = config_from_dict({"log": log, "launch": {"device": "cpu"}, "checkpoint": {"staging_gib": 1}})
    assert check(config, 1)[0] == (
        "config: checkpoint.staging_gib does nothing: checkpoint.background is false. Remove it, or set"
        " checkpoint.background=true"
    )
