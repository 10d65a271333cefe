"""Terrazzo's own dialect against what the trainer makes of the same configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError

from terrazzo.config import CONFIG_KEYS, SHORTHANDS, Config, config_from_dict
from terrazzo.dialects.core.description import Description, Setting, build
from terrazzo.dialects.core.dialect import Finding, ReadingContext
from terrazzo.dialects.formats.terrazzo.dialect import DIALECT as OURS
from terrazzo.dialects.formats.torchtitan.dialect import DIALECT as TORCHTITAN
from terrazzo.dialects.registry import NAMES, dialect
from terrazzo.dialects.verbs.check import check
from terrazzo.dialects.verbs.convert import convert_reading
from terrazzo.dialects.verbs.diff import compare
from terrazzo.dialects.verbs.precision_table import costs
from terrazzo.dialects.verbs.understand import Understood, read_document, understand
from terrazzo.documents import Loaded, load
from terrazzo.documents.dotted_keys import flatten
from terrazzo.engine import LossScaling, Plan
from terrazzo.engine.plan import place
from terrazzo.errors import BadInput
from terrazzo.train.settings.plan import build_plan, build_precision
from tests.dialects.peers import assert_agrees_or_says, converted

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))

OTHER: dict[str, Any] = {
    "model.kind": "huggingface",
    "model.path": "models/a",
    "model.weights": "pretrained",
    "model.vocab_size": 300,
    "model.dim": 64,
    "model.layers": 2,
    "model.heads": 8,
    "model.kv_heads": 2,
    "model.ffn_dim": 128,
    "model.tie_embeddings": False,
    "model.rope_theta": 5e5,
    "model.dropout": 0.1,
    "model.experts.count": 8,
    "model.experts.top_k": 3,
    "model.experts.ffn_dim": 96,
    "model.experts.shared": 1,
    "model.experts.scores": "sigmoid",
    "model.experts.normalize": False,
    "model.experts.apply": "before",
    "model.experts.balance": "loss",
    "model.experts.bias_rate": 1e-2,
    "model.experts.loss_weight": 0.1,
    "model.experts.z_loss": 1e-3,
    "model.attention.window": 64,
    "model.attention.stride": 16,
    "model.attention.full_every": 2,
    "model.attention.prefix": True,
    "lora.rank": 4,
    "lora.alpha": 32.0,
    "lora.dropout": 0.1,
    "lora.target_modules": ["q_proj"],
    "lora.bias": "all",
    "data.chat_template": "chat.jinja",
    "data.loss_on": "all",
    "data.packing": "single",
    "data.too_long": "drop",
    "data.source": ["a.txt", "b/*.jsonl"],
    "data.text_field": "body",
    "data.tokenizer": "tok",
    "data.end_of_document": "</s>",
    "data.max_bytes": 1000,
    "data.validation_source": "v.txt",
    "data.validation_fraction": 0.1,
    "data.cache": "cache",
    "plan.name": "shard_grad_op",
    "plan.weight": "D",
    "plan.between": "-",
    "plan.grad": "D",
    "plan.optim": "D",
    "plan.mesh.dp_replicate": 2,
    "plan.mesh.dp_shard": 4,
    "plan.mesh.cp": 2,
    "plan.mesh.tp": 2,
    "plan.mesh.ep": 2,
    "plan.mesh.pp": 2,
    "parallel.tensor.plan": {"up": "colwise", "down": "rowwise"},
    "parallel.tensor.sequence": False,
    "parallel.context.mode": "ring",
    "parallel.context.balance": "none",
    "parallel.pipeline.schedule": "gpipe",
    "parallel.pipeline.chunks": 2,
    "plan.units": ["Block", "embed*"],
    "plan.prefetch": 3,
    "plan.sync_every": 10,
    "plan.outer.lr": 0.5,
    "plan.outer.momentum": 0.8,
    "plan.outer.traffic": "int8",
    "plan.outer.fragments": 2,
    "plan.outer.delay": 3,
    "plan.outer.mixing": 0.25,
    "plan.outer.meet_every": 50,
    "offload.weight": "cpu",
    "offload.grad": "cpu:0.5",
    "offload.optim": "nvme:0.5,cpu:0.3",
    "offload.activations": "cpu",
    "offload.path": ["/mnt/a", "/mnt/b"],
    "offload.step": "synchronous",
    "offload.threads": 3,
    "offload.pin": False,
    "offload.direct": False,
    "offload.block_mib": 0.5,
    "offload.depth": 2,
    "offload.digest": True,
    "precision.name": "fp16",
    "precision.weight": "fp32",
    "precision.compute": "bf16",
    "precision.reduce": "bf16",
    "precision.accumulate": "fp64",
    "precision.master": "bf16",
    "precision.moments": "int8",
    "precision.rounding": "stochastic",
    "precision.frozen": "nf4",
    "precision.gather": "int8",
    "precision.quantized_reduce": "int4",
    "precision.error_feedback": True,
    "precision.linears": "fp8-rowwise",
    "precision.skip": ["*.gate", "head"],
    "objective.name": "dpo",
    "objective.loss": "full",
    "objective.beta": 0.2,
    "objective.label_smoothing": 0.1,
    "data.attention": "document",
    "batch.global_batch": 64,
    "batch.micro_batch": 2,
    "batch.sequence_length": 128,
    "optimizer.name": "SGD",
    "optimizer.lr": 1e-5,
    "optimizer.weight_decay": 0.0,
    "optimizer.decay": "all",
    "optimizer.no_decay": ["*.bias"],
    "optimizer.options": {"betas": [0.9, 0.95], "eps": 1e-6, "amsgrad": True},
    "optimizer.muon.lr": 0.01,
    "optimizer.muon.weight_decay": 0.0,
    "optimizer.muon.momentum": 0.9,
    "optimizer.muon.nesterov": False,
    "optimizer.muon.ns_steps": 4,
    "optimizer.muon.adjust_lr": "original",
    "optimizer.muon.matrices": ["*.mixer"],
    "optimizer.muon.others": ["*.readout.*"],
    "schedule.name": "linear",
    "schedule.warmup_steps": 7,
    "schedule.final_fraction": 0.0,
    "schedule.decay_steps": 9,
    "train.steps": 77,
    "train.clip": None,
    "train.seed": 3,
    "train.eval_every": 5,
    "train.eval_batches": 2,
    "train.sample_every": 4,
    "train.check_replicas_every": 6,
    "train.sample_tokens": 0,
    "train.sample_prompt": "x",
    "train.sample_chat": "Who?",
    "train.activation_checkpointing": "every_3",
    "train.activation_checkpointing_ops": ["mm"],
    "train.compile": True,
    "checkpoint.folder": "s3://bucket/a",
    "checkpoint.every": 11,
    "checkpoint.local.folder": "/dev/shm",
    "checkpoint.local.every": 3,
    "checkpoint.local.partner": "none",
    "checkpoint.mtbf_hours": 1e4,
    "checkpoint.overhead": 0.01,
    "checkpoint.keep_last": None,
    "checkpoint.keep_every": 100,
    "checkpoint.keep_best": 2,
    "checkpoint.background": True,
    "checkpoint.staging_gib": 2.5,
    "checkpoint.resume": "never",
    "checkpoint.overwrite": True,
    "checkpoint.cast": True,
    "checkpoint.allow_changed_data": True,
    "checkpoint.save_format": "hf",
    "guard.action": "rollback",
    "guard.spike": 6.0,
    "guard.window": 50,
    "guard.skip_batches": 2,
    "guard.limit": 3,
    "guard.replay_every": 7,
    "guard.memory_every": 9,
    "launch.ranks": 8,
    "launch.device": "cpu",
    "launch.timeout_s": 60.0,
    "launch.threads": 1,
    "launch.stall_s": 5.0,
    "launch.restarts": 2,
    "launch.ignore_planner": True,
    "log.folder": "runs/a",
    "log.every": 1,
    "log.tensorboard": False,
    "log.note": "done",
}
"""A value of every key that is not its default."""

WITH = {
    **{
        f"model.experts.{key}": {"model.experts.count": 8}
        for key in ("top_k", "ffn_dim", "shared", "scores", "normalize", "apply", "balance", "bias_rate", "z_loss")
    },
    "model.experts.loss_weight": {"model.experts.count": 8, "model.experts.balance": "loss"},
    **{f"model.attention.{key}": {"model.attention.window": 64} for key in ("stride", "full_every")},
    "precision.rounding": {"precision.name": "bf16-pure", "precision.moments": "int8"},
    "train.activation_checkpointing_ops": {"train.activation_checkpointing": "selective"},
    "precision.error_feedback": {"precision.quantized_reduce": "int4"},
    "guard.window": {"guard.spike": 8.0},
    "guard.action": {"checkpoint.every": 11},
    "guard.skip_batches": {"guard.action": "rollback", "checkpoint.every": 11},
    "plan.sync_every": {"plan.mesh.dp_replicate": 2},
    "model.path": {"model.kind": "huggingface"},
    "model.kind": {"model.path": "a"},
    "model.weights": {"model.kind": "huggingface", "model.path": "a"},
    **{f"lora.{name}": {"lora.rank": 4, "model.kind": "huggingface", "model.path": "a", "model.weights": "pretrained"}
       for name in ("rank", "alpha", "dropout", "target_modules", "bias")},
    "precision.frozen": {"lora.rank": 4, "model.kind": "huggingface", "model.path": "a", "model.weights": "pretrained"},
    "offload.activations": {"train.activation_checkpointing": "full"},
    **{f"objective.{name}": {"objective.name": "dpo"} for name in ("beta", "label_smoothing")},
    "schedule.decay_steps": {"schedule.name": "wsd"},
    "precision.skip": {"precision.linears": "fp8-rowwise"},
    **{f"plan.{state}": {f"plan.{other}": "D" for other in ("weight", "between", "grad", "optim")} for state in
       ("weight", "between", "grad", "optim")},
}  # fmt: skip
"""Keys that another needs beside it."""


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        inner = document
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return document


def test_every_key_has_another_value_here_and_a_meaning() -> None:
    assert set(OTHER) == set(CONFIG_KEYS)
    assert all(OTHER[key] != known.default for key, known in CONFIG_KEYS.items())
    assert all(known.meaning for known in CONFIG_KEYS.values())


def assert_the_same_run(document: dict[str, Any]) -> Description:
    """Each key is a setting, or kept beside them, with its value; and what settings say is written as they say it."""
    reading = OURS.read(document)
    assert [verdict for verdict in reading.verdicts if verdict.kind != "applied"] == []
    flat = flatten(document, HUB_OPAQUE)
    assert {verdict.key: verdict.value for verdict in reading.verdicts} == flat
    kept = {extra.key: extra.value for extra in reading.description.extras}
    assert kept == {key: flat[key] for key in kept}
    told = {key for _, setting in reading.description.items() for key in setting.keys}
    assert set(flat) == told | set(kept)
    assert_agrees_or_says(OURS.name, document)
    config_from_dict(document)
    return reading.description


HUB_OPAQUE = ("optimizer.options", "parallel.tensor.plan", "offload.weight", "offload.grad", "offload.optim")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_survive(path: Path) -> None:
    document = load(path).document
    assert document == yaml.safe_load(path.read_text())
    assert OURS.recognises(document)
    assert_the_same_run(document)


def test_each_key_survives() -> None:
    for key, value in OTHER.items():
        assert_the_same_run(nested({**WITH.get(key, {}), key: value}))


@pytest.mark.parametrize("section", SHORTHANDS)
def test_a_section_by_its_name_alone_survives(section: str) -> None:
    document = {section: OTHER[f"{section}.name"]}
    assert OURS.recognises(document)
    assert_the_same_run(document)
    conversion = convert_reading(OURS, OURS.read(document), OURS, ReadingContext())
    assert conversion.document == document
    by_name = {section: {"name": document[section]}}
    kinds = [convert_reading(OURS, OURS.read(each), TORCHTITAN, ReadingContext()) for each in (document, by_name)]
    assert [each.kind for each in kinds[0].verdicts] == [each.kind for each in kinds[1].verdicts]
    unknown = "applied" if section == "optimizer" else "refused"  # which classes there are is the trainer's to say
    assert [verdict.kind for verdict in OURS.read({section: "nonesuch"}).verdicts] == [unknown]


def test_all_keys_at_once_survive() -> None:
    left_out = {"plan.name", "model.kind", "model.path", "model.weights", "train.sample_prompt"}
    left_out |= {"model.experts.bias_rate", "checkpoint.save_format"}  # beside a loss, and beside experts
    left_out |= {"model.attention.prefix"}  # beside a window
    left_out |= {"objective.name", "objective.beta", "objective.label_smoothing"}  # pairs leave less to choose
    left_out |= {"parallel.pipeline.schedule", "precision.frozen"}  # gpipe has no chunks, and fp8 no frozen matrices
    left_out |= {"plan.mesh.pp", "plan.sync_every"}  # stages write no text, and a round no codes
    left_out |= {"precision.accumulate", "train.activation_checkpointing_ops"}  # beside codes, and beside every_3
    left_out |= {"train.compile", "guard.replay_every"}  # beside cp, and beside ep
    left_out |= {"parallel.tensor.plan", "parallel.tensor.sequence"}  # beside experts
    flat = {key: value for key, value in OTHER.items() if key not in left_out and not key.startswith("lora.")}
    assert_the_same_run(nested({**flat, "schedule.name": "wsd"}))


@pytest.mark.parametrize("key", ["checkpoint.every", "offload.threads", "plan.mesh.dp_shard", "train.eval_every"])
def test_an_explicit_null_survives(key: str) -> None:
    assert_the_same_run(nested({key: None}))


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({"precision": {"linears": "fp8-rowwise", "skip": []}}, "precision.skip"),
        (
            {"train": {"activation_checkpointing": "selective", "activation_checkpointing_ops": []}},
            "activation_checkpointing.ops",
        ),
    ],
)
def test_an_empty_list_is_another_choice_than_null(raw: dict[str, Any], path: str) -> None:
    chosen, left = (read_document(OURS, document, ReadingContext()).description for document in (raw, {}))
    assert (chosen.value(path), left.value(path)) == ((), None)
    assert path in {difference.path for difference in compare(chosen, left)}
    assert flatten(converted("terrazzo", "terrazzo", raw).document).items() >= flatten(raw).items()


def test_groups_that_follow_the_number_of_ranks_survive() -> None:
    mesh = {"dp_replicate": None, "dp_shard": 2}
    assert_the_same_run({"plan": {"name": "zero3", "mesh": mesh, "sync_every": 5}})
    assert_the_same_run({"plan": {"name": "hybrid_shard", "mesh": mesh}, "launch": {"ranks": "2:8", "restarts": 1}})


def test_a_decay_of_null_is_the_fifth_that_nothing_is() -> None:
    schedule = {"schedule": {"name": "wsd", "decay_steps": None}, "train": {"steps": 50}}
    assert OURS.read(schedule).description.value("schedule.decay_steps") == 10


def test_saving_as_it_pays_survives_and_is_no_number_to_others() -> None:
    description = assert_the_same_run({"checkpoint": {"every": "auto", "mtbf_hours": 1e4}})
    assert description.value("saving.every") is None


def test_a_range_of_ranks_survives_and_is_its_most_to_others() -> None:
    description = assert_the_same_run({"launch": {"ranks": "2:4", "restarts": 1}})
    assert description.value("mesh.world") == 4


def test_a_range_of_ranks_is_read_from_a_file_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("launch: {ranks: 2:4, restarts: 1}\n")
    reading = understand(tmp_path / "a.yaml", "terrazzo").reading
    assert reading.description.value("mesh.world") == 4


@pytest.mark.parametrize("name", place.PLANS)
def test_plans_are_the_trainers(name: str) -> None:
    for text in (name, *(f"{name}@{offload}{share}" for offload in place.OFFLOADS for share in ("", ":0.7"))):
        document = {"plan": {"name": text, "mesh": {"dp_replicate": 2}}}
        plan = OURS.read(document).description.plan
        built = build_plan(config_from_dict(document))
        assert plan is not None, text
        assert plan.places() == built.places(), text
        assert plan.places() == Plan.named(text).places(), text


@pytest.mark.parametrize(
    "section",
    [
        {"optim": "cpu"},
        {"weight": "nvme", "grad": {"cpu": 0.5, "device": 0.5}},
        {"optim": {"nvme": 0.5, "cpu": 0.25}},
        {"grad": "device", "optim": "cpu:0.5"},
    ],
)
@pytest.mark.parametrize(
    "plan", ["zero3", "zero2@cpu", {"weight": "-", "between": "-", "grad": "D@cpu", "optim": "D@nvme"}]
)
def test_tiers_are_the_trainers(plan: Any, section: dict[str, Any]) -> None:
    document = {"plan": plan, "offload": section}
    read_plan = OURS.read(document).description.plan
    assert read_plan is not None
    built = build_plan(config_from_dict(document)).places()
    assert {state: (p.axes, p.shares) for state, p in read_plan.places().items()} == {
        state: (p.axes, p.shares) for state, p in built.items()
    }


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-pure", "fp16"])
@pytest.mark.parametrize("own", [{}, {"reduce": "bf16"}, {"master": "fp32", "compute": "fp16"}])
def test_dtypes_are_the_trainers(name: str, own: dict[str, str]) -> None:
    document = {"precision": {"name": name, **own}}
    description = OURS.read(document).description
    built = build_precision(config_from_dict(document))
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    for field in ("weight", "compute", "reduce", "accumulate", "master", "moments"):
        assert description.value(f"precision.{field}") == names[getattr(built, field)], field
    assert description.value("precision.loss_scaling") == built.loss_scaling


BAD = {
    "plan": ["zero4", 3, None, ["zero3"]],
    "plan.name": ["zero3@tape"],
    "plan.mesh.dp_shard": [0, "two", 1.5],
    "plan.units": ["Block", [1]],
    "plan.prefetch": [-1],
    "precision": ["bf17", 16],
    "precision.reduce": ["half"],
    "offload.optim": ["disk", {"cpu": 2}, {"cpu": 0.7, "nvme": 0.7}, [1]],
    "offload.step": ["later"],
    "offload.block_mib": ["big"],
    "batch.global_batch": [0, "many", 1.5],
    "optimizer.lr": [-1, "fast"],
    "optimizer.options": [3],
    "schedule.name": ["cosin"],
    "schedule.final_fraction": [2],
    "train.clip": ["x"],
    "train.activation_checkpointing": ["every_0", "some"],
    "train.compile": ["maybe"],
    "checkpoint.save_format": ["hff"],
    "launch.device": ["tpu"],
    "plann.name": ["zero3"],
    "optimizer.learning_rate": [0.1],
}


@pytest.mark.parametrize("key", BAD)
def test_what_the_trainer_refuses_is_refused(key: str) -> None:
    for value in BAD[key]:
        document = nested({key: value})
        with pytest.raises(BadInput):
            build_plan(config_from_dict(document))
        verdicts = OURS.read(document).verdicts
        refused = [verdict for verdict in verdicts if verdict.kind == "refused"]
        assert [verdict.key for verdict in refused] == [key], value
        assert refused[0].why, value


WRONG: tuple[Any, ...] = (
    True,
    1,
    -1,
    0.5,
    1e308,
    "on",
    "12",
    "1_000",
    "BF16",
    "a,b",
    "²",
    [],
    ["a"],
    [1],
    {},
    {"a": 1},
)
"""Of each, some key takes it and another does not."""


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("section", Config.model_fields)
def test_the_trainer_and_the_reader_agree_about_every_key(section: str, every: int) -> None:
    """What the trainer refuses of a key by itself, the reader refuses; and nothing that the trainer takes."""
    keys = [key for key in (section, *CONFIG_KEYS) if key.partition(".")[0] == section]
    for number, key in enumerate(keys):
        beside = {other: value for other, value in WITH.get(key, {}).items() if other != key}
        for value in WRONG[number % every :: every]:  # neighbours take the others
            document = nested({**beside, key: value})
            refused = [verdict.why for verdict in OURS.read(document).verdicts if verdict.kind == "refused"]
            faults = wrong_keys(document)
            if faults:
                assert refused, (key, value, faults)
            elif is_taken(document):
                assert not refused, (key, value, refused)


def wrong_keys(document: dict[str, Any]) -> list[str]:
    """What pydantic finds, without what keys do not agree about."""
    try:
        Config.model_validate(document)
    except ValidationError as error:
        places = [(".".join(map(str, each["loc"])), each["type"]) for each in error.errors()]
        return [place for place, kind in places if kind != "value_error" or place in CONFIG_KEYS]
    return []


def is_taken(document: dict[str, Any]) -> bool:
    try:
        build_plan(config_from_dict(document))
    except BadInput:
        return False
    return True


def test_misspelt_keys_find_their_neighbours() -> None:
    document = {"trian": {"steps": 1}, "train": {"step": 2}, "optimizer": {"learnrate": 1}}
    why = {verdict.key: verdict.why for verdict in OURS.read(document).verdicts}
    assert "Did you mean 'train.steps'?" in why["trian.steps"]
    assert "Did you mean 'steps'?" in why["train.step"]


def test_a_plan_of_places_needs_all_four_and_no_name() -> None:
    for places in ({"weight": "D"}, {"name": "zero3", "weight": "D", "between": "D", "grad": "D", "optim": "D"}):
        with pytest.raises(BadInput):
            config_from_dict({"plan": places})
        assert {verdict.kind for verdict in OURS.read({"plan": places}).verdicts} == {"refused"}


def test_tiers_without_a_folder_and_rows_that_do_not_nest_are_found() -> None:
    document = {"plan": {"weight": "D", "between": "D", "grad": "D", "optim": "-"}, "offload": {"optim": "nvme"}}
    read = Understood(
        Loaded(Path("x.yaml"), document, "", "yaml"), OURS, read_document(OURS, document), ReadingContext()
    )
    texts = [(finding.key, finding.text) for finding in check(read)]
    assert [key for key, _ in texts] == ["plan.weight", "offload.path"]
    assert "prefix" in texts[0][1] and "folder" in texts[1][1]


@pytest.mark.parametrize(("value", "shown"), [(["cpu", "nvme"], "['cpu', 'nvme']"), (True, "true"), (2, "2")])
def test_a_tier_of_another_type_is_shown_as_it_stands(value: Any, shown: str) -> None:
    verdict = OURS.read({"offload": {"optim": value}}).verdicts[0]
    assert verdict.kind == "refused"
    assert verdict.why.startswith(f"it is {shown}, expected device, cpu, nvme")


def test_a_tier_that_is_none_is_found_wherever_it_stands() -> None:
    places = {"weight": "D", "between": "D", "grad": "D", "optim": "D@tape"}
    assert [
        "names the tier 'tape'" in finding.text
        for finding in OURS.findings(OURS.read({"plan": places}), ReadingContext())
    ] == [True]
    for document in (
        {"plan": "zero3@cpu:1.5"},
        {"offload": {"optim": "cpu:1.5"}},
        {"offload": {"optim": {"cpu": 1.5}}},
    ):
        (refused,) = [verdict for verdict in OURS.read(document).verdicts if verdict.kind == "refused"]
        with pytest.raises(BadInput) as caught:
            build_plan(config_from_dict(document))
        assert refused.why in str(caught.value)
        assert "'1.5' is not a number from 0 to 1" in refused.why


# -- writing what others say ---------------------------------------------------------------------------------------


def written(settings: dict[str, Any], context: ReadingContext | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document and the verdicts by path of a foreign description."""
    description = build("other", {path: Setting(value, "file", f"their.{path}") for path, value in settings.items()})
    writing = OURS.write(description, context or ReadingContext())
    if not any(verdict.kind == "refused" for verdict in writing.verdicts):
        config_from_dict(writing.document)
    assert {verdict.key for verdict in writing.verdicts} == set(settings)
    return writing.document, {verdict.key: verdict for verdict in writing.verdicts}


def row(name: str) -> dict[str, str]:
    return {f"sharding.{state}": str(value) for state, value in Plan.named(name).places().items()}


ZERO3 = row("zero3")


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3", "shard_grad_op"])
def test_rows_are_written_by_name(name: str) -> None:
    document, verdicts = written(row(name))
    assert document == {"plan": {"name": name}}
    assert {verdict.kind for verdict in verdicts.values()} == {"applied"}


def test_a_row_without_a_name_is_written_in_places() -> None:
    places = {"weight": "-", "between": "-", "grad": "-", "optim": "S"}
    document, _ = written({f"sharding.{state}": axes for state, axes in places.items()} | {"mesh.dp_replicate": 2})
    assert document["plan"] == {**places, "mesh": {"dp_replicate": 2}}


def test_a_hybrid_row_needs_the_number_of_replicas() -> None:
    document, verdicts = written(row("hybrid_shard"))
    assert "plan" not in document
    assert verdicts["sharding.weight"].kind == "refused"
    document, verdicts = written({**row("hybrid_shard"), "mesh.dp_replicate": 2})
    assert document["plan"] == {"name": "hybrid_shard", "mesh": {"dp_replicate": 2}}


def test_ulysses_is_context_parallelism_by_its_mode_both_ways() -> None:
    document, verdicts = written({"mesh.sp": 2, "mesh.tp": 2})
    assert document["plan"]["mesh"] == {"cp": 2, "tp": 2}
    assert document["parallel"] == {"context": {"mode": "ulysses"}}
    assert verdicts["mesh.sp"].kind == "applied"
    again = assert_the_same_run(document)
    assert (again.mesh.sp.value, again.mesh.cp.value, again.mesh.tp.value) == (2, 1, 2)
    ring = OURS.read({**document, "parallel": {"context": {"mode": "ring"}}}).description
    assert (ring.mesh.sp.value, ring.mesh.cp.value) == (1, 2)
    _, verdicts = written({"mesh.sp": 2, "mesh.cp": 2})
    assert verdicts["mesh.sp"].kind == "refused"


@pytest.mark.parametrize("axis", ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"])
def test_the_trainer_has_every_axis(axis: str) -> None:
    document, verdicts = written({f"mesh.{axis}": 2})
    assert verdicts[f"mesh.{axis}"].kind == "applied"
    assert document["plan"]["mesh"] == {axis: 2}


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("fp32",) * 6, {"name": "fp32"}),
        (("bf16", "bf16", "fp32", "fp32", "fp32", "fp32"), {"name": "bf16"}),
        (("bf16", "bf16", "bf16", "bf16", "fp32", "fp32"), {"name": "bf16", "reduce": "bf16", "accumulate": "bf16"}),
        (("bf16",) * 6, {"name": "bf16-pure"}),
        (("fp32", "bf16", "bf16", "fp32", "fp32", "fp32"), None),
    ],
)
def test_dtypes_are_pinned(dtypes: tuple[str, ...], expected: dict[str, str] | None) -> None:
    fields = ("weight", "compute", "reduce", "accumulate", "master", "moments")
    document, verdicts = written({f"precision.{field}": dtype for field, dtype in zip(fields, dtypes, strict=True)})
    assert {verdict.kind for verdict in verdicts.values()} == {"applied"}
    built = build_precision(config_from_dict(document))
    names = {"fp32": torch.float32, "bf16": torch.bfloat16}
    assert [getattr(built, field) for field in fields] == [names[dtype] for dtype in dtypes]
    assert expected is None or document["precision"] == expected


def test_loss_scaling_is_named_where_it_is_another() -> None:
    fp16 = {"precision.compute": "fp16", "precision.weight": "fp16"}
    document, verdicts = written({**fp16, "precision.loss_scaling": LossScaling(interval=1000, hysteresis=2)})
    assert document["precision"]["name"] == "fp16"
    assert verdicts["precision.loss_scaling"].kind == "lossy"
    assert "interval 1000 becomes 2000, hysteresis 2 becomes 1" in verdicts["precision.loss_scaling"].why
    document, verdicts = written({**fp16, "precision.loss_scaling": None})
    assert build_precision(config_from_dict(document)).loss_scaling is None
    _, verdicts = written({**fp16, "precision.static_loss_scale": 128.0})
    assert verdicts["precision.static_loss_scale"].kind == "lossy"


@pytest.mark.parametrize(
    ("path", "value", "kind", "why"),
    [
        ("precision.saved", "bf16", "lossy", "checkpoint convert"),
        ("precision.buffers", "bf16", "lossy", "buffers"),
        ("precision.output", "fp32", "applied", ""),
        ("precision.autocast", True, "lossy", "autocast"),
        ("precision.master", "fp8", "refused", "fp8"),
        ("precision.master", "loaded", "lossy", "--load-dtype"),
        ("units.policy", "min_numel", "lossy", "by themselves"),
        ("units.ignored", "lm_head", "refused", "no list of exceptions"),
        ("optimizer.name", "Lamb", "refused", "flat shards"),
        ("optimizer.options", {"bias_correction": True}, "lossy", "bias_correction"),
        ("schedule.name", "OneCycle", "refused", "constant, cosine, linear, wsd"),
        ("schedule.options", {"warmup_type": "log"}, "lossy", "warmup_type log"),
        ("schedule.warmup_fraction", 0.1, "lossy", "schedule.warmup_steps"),
        ("activation_checkpointing.mode", "budget", "lossy", "full"),
        ("activation_checkpointing.offload", True, "lossy", "there is none"),
        ("saving.state", "full", "applied", "sharded"),
        ("saving.state", "local", "applied", "sharded"),
        ("batch.accumulation", 4, "lossy", "micro-batch"),
        ("loading.broadcast", True, "applied", ""),
        ("offload.buffers", 5, "applied", ""),  # of nothing, where nothing is offloaded
    ],
)
def test_what_cannot_be_said_is_named(path: str, value: Any, kind: str, why: str) -> None:
    base = {"precision.output": {"precision.compute": "fp32"}, "precision.saved": {"precision.master": "fp32"}}
    _, verdicts = written({**base.get(path, {}), path: value})
    assert verdicts[path].kind == kind
    assert why in verdicts[path].why


@pytest.mark.parametrize("mode", ["none", "full", "selective", "selective_half"])
def test_modes_of_recomputation_are_written_by_name(mode: str) -> None:
    document = {"train": {"activation_checkpointing": mode}}
    assert written({"activation_checkpointing.mode": mode})[0] == document
    assert_the_same_run(document)


@pytest.mark.parametrize("dialect", ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop"])
def test_optimizer_options_go_where_the_class_has_them(dialect: str) -> None:
    settings = {"optimizer.name": dialect, "optimizer.betas": (0.9, 0.99), "optimizer.eps": 1e-7, "optimizer.lr": 0.1}
    document, verdicts = written(settings)
    options = document["optimizer"].get("options", {})
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = getattr(torch.optim, dialect)([parameter], lr=0.1, **options)
    assert ("betas" in optimizer.defaults) == (verdicts["optimizer.betas"].kind == "applied")
    assert ("eps" in optimizer.defaults) == (verdicts["optimizer.eps"].kind == "applied")


def test_the_global_batch_follows_from_the_ranks() -> None:
    settings = {"batch.micro_batch": 2, "batch.accumulation": 4}
    document, verdicts = written(settings, ReadingContext(world=8))
    assert document["batch"] == {"micro_batch": 2, "global_batch": 64}
    document, verdicts = written(settings)
    assert document["batch"] == {"micro_batch": 2}
    assert "--world" in verdicts["batch.accumulation"].why
    document, verdicts = written({**settings, "batch.global_batch": 60}, ReadingContext(world=8))
    assert verdicts["batch.accumulation"].kind == "lossy"


@pytest.mark.parametrize(
    ("warmup", "decay", "left"), [(200, 900, 800), (100, 900, 900), (1000, 200, None), (1100, 200, None)]
)
def test_a_decay_is_no_longer_than_warm_up_leaves(warmup: int, decay: int, left: int | None) -> None:
    settings = {"name": "wsd", "warmup_steps": warmup, "decay_steps": decay, "total_steps": 1000}
    document, verdicts = written({f"schedule.{name}": value for name, value in settings.items()})
    assert document["schedule"].get("decay_steps") == left
    assert verdicts["schedule.decay_steps"].kind == ("applied" if left == decay else "lossy")


TOO_LONG: dict[str, dict[str, Any]] = {
    "trainer": {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 90},
        "warmup_steps": 50,
        "max_steps": 100,
    },
    "megatron": {
        "lr-decay-style": "WSD",
        "lr-wsd-decay-iters": 90,
        "lr-warmup-iters": 50,
        "train-iters": 100,
    },
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_what_train_would_refuse_of_keys_together_has_a_verdict(name: str) -> None:
    conversion = converted(name, "terrazzo", TOO_LONG[name])
    config_from_dict(conversion.document)
    assert any("longer than" in verdict.why for verdict in conversion.verdicts if verdict.kind == "lossy")


@pytest.mark.parametrize("key", ["schedule.warmup_steps", "train.steps", "guard.spike"])
def test_what_the_target_refuses_together_is_refused_of_the_key_that_wrote_it_or_of_none(key: str) -> None:
    document = {"training": {"steps": 50}, "lr_scheduler": {"warmup_steps": 40}}
    target = replace(OURS, findings=lambda *_: [Finding.error(key, "too much"), Finding.warning(key, "meant")])
    conversion = convert_reading(TORCHTITAN, TORCHTITAN.read(document), target, ReadingContext())
    told = [*conversion.verdicts, *conversion.unsaid]
    said = [each for each in told if "too much" in each.why]
    assert [(each.kind, key in each.target) for each in said] == [("refused", True)]
    assert [fault.key for fault in conversion.faults] == [key]
    assert not any("meant" in each.why for each in told)
    itself = convert_reading(OURS, OURS.read({}), target, ReadingContext())
    assert (itself.unsaid, itself.faults) == ((), ())


def test_what_is_unset_stays_unsaid() -> None:
    writing = OURS.write(Description("other"))
    assert writing.document == {}
    assert writing.verdicts == ()


def test_the_batch_of_a_file_is_derived() -> None:
    document = {"batch": {"global_batch": 64, "micro_batch": 2}}
    assert read_document(OURS, document, ReadingContext(world=8)).description["batch.accumulation"].value == 4
    assert OURS.read(document).description["batch.accumulation"].value is None


def test_the_hub_has_its_keys_as_every_dialect_does() -> None:
    assert {*CONFIG_KEYS, "plan", "precision"} < set(OURS.keys)
    assert OURS.meaning("train.steps") == CONFIG_KEYS["train.steps"].meaning
    assert OURS.meaning("optimizer.options.foreach") == OURS.meaning("no.such.key") == ""


def test_bf16_with_its_remainder_is_an_fp32_master() -> None:
    document = {"plan": "zero3", "precision": {"name": "bf16-pure", "moments": "int8", "rounding": "remainder"}}
    reading = OURS.read(document)
    assert [reading.description.value(f"precision.{name}") for name in ("weight", "master", "saved")] == [
        *("bf16", "fp32", "fp32")
    ]
    assert OURS.write(reading.description).document["precision"] == document["precision"]
    (cost,) = costs(reading.description, (1,))
    assert cost.bytes_per_parameter == pytest.approx(8 + 2 * 4 / 256)
    for name in sorted(set(NAMES) - {"terrazzo"}):
        conversion = convert_reading(OURS, reading, dialect(name), ReadingContext())
        (told,) = [verdict for verdict in conversion.verdicts if verdict.key == "precision.rounding"]
        assert told.kind == "lossy" and "precision.rounding = remainder" in told.why, name
        assert conversion.after.value("precision.master") in ("fp32", "loaded", None), name


def test_optimizer_and_schedule_may_be_one_word() -> None:
    reading = OURS.read({"optimizer": "Lion", "schedule": "wsd"})
    assert [(verdict.key, verdict.kind) for verdict in reading.verdicts] == [
        ("optimizer", "applied"),
        ("schedule", "applied"),
    ]
    told = [reading.description.value(path) for path in ("optimizer.name", "optimizer.betas", "schedule.name")]
    assert told == ["Lion", (0.9, 0.99), "wsd"]
