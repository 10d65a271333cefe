"""Mistakes in a configuration that the schema cannot see: each is refused before a process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from terrazzo import cli
from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.train.preflight import check
from terrazzo.train.preflight.refusals import refusals

OPS = {"activation_checkpointing": "selective", "activation_checkpointing_ops": ["nope"]}
CUT = {"parallel": {"tensor": {"plan": {"blocks.*.nope": "column"}}}}
LOOPED = {"parallel": {"pipeline": {"chunks": 3}}}
NARROW = {"name": "bf16-pure", "moments": "int8", "rounding": "stochastic"}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"data": {"too_long": "drop"}}, r"data\.too_long is 'drop', but with data\.packing 'stream'"),
        ({"precision": {"moments": "int8"}, "optimizer": {"name": "Muon"}}, "moments in int8, and Muon is not known"),
        ({"precision": NARROW, "optimizer": {"name": "SGD"}}, "SGD does not count steps. Use Adam,"),
        ({"guard": {"action": "rollback"}}, r"no checkpoint to go back to\. Set checkpoint\.every"),
        ({"data": {"cache": "/proc/tokens"}}, r"data\.cache is '/proc/tokens', but '/proc' cannot be written to"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_it_is_refused_with_the_edit(tmp_path: Path, raw: dict[str, Any], said: str) -> None:
    raw = {"log": {"folder": str(tmp_path / "run")}, "launch": {"device": "cpu"}, **raw}
    with pytest.raises(BadInput, match=said):
        check(config_from_dict(raw), 2)
    assert not any(tmp_path.iterdir())


GROUPS = {"mesh": {"dp_replicate": 2}}


def _shared(mode: str = "gather", **mesh: int) -> dict[str, Any]:
    return {"plan": {"mesh": mesh}, "parallel": {"context": {"mode": mode}}}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"precision": {"rounding": "stochastic"}}, "rounding 'stochastic' is of master weights in bf16"),
        ({"precision": {"name": "bf16-pure", "rounding": "remainder"}}, "here master is bf16 and moments are bf16"),
        ({"precision": {"moments": "int8", "master": "fp64"}}, "moments in int8 under a master in fp64"),
        ({"precision": {"gather": "int8", "compute": "fp64"}}, "gather int8 of weights that are computed with in fp64"),
        ({"precision": {"quantized_reduce": "int8", "accumulate": "fp64"}}, "of gradients that are kept in fp64"),
        ({"precision": {"moments": "int8"}, "optimizer": {"name": "Muon"}}, "moments in int8, and Muon is not known"),
        ({"precision": NARROW, "optimizer": {"name": "SGD"}}, "SGD does not count steps"),
        ({"train": {"activation_checkpointing_ops": ["mm"]}}, "are kept by 'selective' alone"),
        ({"train": OPS}, "no operator 'nope'"),
        ({"optimizer": {"no_decay": ["*.bias", "haed.*"]}}, "no_decay has '*.bias', which no parameter's"),
        ({"optimizer": {"name": "Muon", "muon": {"matrices": ["haed.*"]}}}, "muon.matrices has 'haed.*', which no"),
        ({"plan": {"units": ["Blcok"]}}, "plan.units: 'Blcok' matches no module of Decoder. Did you mean 'Block'?"),
        ({**_shared(tp=2), **CUT}, "parallel.tensor.plan: "),
        ({**_shared(pp=2), "model": {"layers": 1}, **LOOPED}, "plan.mesh.pp 2: "),
        ({"precision": {"linears": "fp8-rowwise", "skip": ["*"]}}, "precision.linears is 'fp8-rowwise'. "),
        ({"objective": {"name": "dpo", "loss": "chunked"}}, "objective.loss is 'chunked', but objective.name 'dpo'"),
        ({"objective": {"loss": "chunked"}, "precision": {"name": "fp16"}}, "'chunked', but under fp16 a chunk's"),
        ({"model": {"dim": 250}}, "dim 250 split over model.heads 4"),
        ({"model": {"kv_heads": 3}}, "heads 4 is not a multiple of model.kv_heads 3"),
        ({"optimizer": {"name": "Foo"}}, "optimizer.name is 'Foo'"),
        (
            {"optimizer": {"name": "Adafactor"}},
            "SGD, or Muon, which has each matrix whole",
        ),
        ({"optimizer": {"options": {"foo": 1}}}, "optimizer.options.foo is not an argument of AdamW"),
        ({"optimizer": {"options": {"fused": "yes"}}}, "optimizer.options.fused is 'yes'"),
        ({"optimizer": {"options": {"betas": [0.9, 1.5]}}}, "Invalid beta parameter at index 1"),
        ({"plan": {"name": "zero4"}}, "There is no plan 'zero4'"),
        ({"plan": {"name": "hybrid_shard"}}, "hybrid_shard"),
        ({"plan": {"name": "hybrid_shard", "sync_every": 4, **GROUPS}}, "with plan.sync_every 4 these groups train"),
        ({"plan": {"sync_every": 7, **GROUPS}}, "plan.sync_every 7 does not divide"),
        ({"offload": {"step": "backward"}}, "offload.step is 'backward'"),
        (
            {"guard": {"memory_every": 5}, "offload": {"optim": "cpu"}},
            "guard.memory_every is 5, and offload.optim 'cpu",
        ),
        ({"data": {"source": "FILL-IN"}}, "data.source is still FILL-IN"),
        ({"data": {"too_long": "drop"}}, "data.too_long is 'drop', but with data.packing 'stream'"),
        ({"data": {"too_long": "drop", "packing": "stream", "source": "*.jsonl"}}, "data.too_long is 'drop'"),
        ({"data": {"chat_template": "a.jinja"}}, "the tokenizer 'bytes' has a template of its own"),
        (_shared(ep=2), "the model has no experts that ranks can share"),
        ({**_shared(ep=2), "model": {"experts": {"count": 3}}}, "model.experts.count 3 does not divide by it"),
        ({**_shared(tp=2), "model": {"heads": 3, "dim": 252}}, "plan.mesh.tp is 2, and model.heads 3"),
        ({**_shared(tp=2), "model": {"vocab_size": 1}}, "model.vocab_size 1 has no part for each rank"),
        ({**_shared(tp=2), "batch": {"sequence_length": 33}}, "which do not divide by plan.mesh.tp 2"),
        ({**_shared(cp=2), "batch": {"sequence_length": 33}}, "Sequences of 33 tokens do not divide into 4"),
        ({**_shared(cp=2, mode="ulysses"), "model": {"heads": 1}}, "model.heads 1 do not divide by 2"),
        ({**_shared(cp=2, mode="ring"), "model": {"attention": {"window": 8}}}, "sends keys around that no token"),
        (_shared(dp_shard=3), "3"),
        ({**_shared(pp=2), "batch": {"global_batch": 4}}, "does not fill a pipeline of 2 ranks"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:24],
)
def test_config_check_says_what_training_refuses_of_the_configuration_alone(
    tmp_path: Path, raw: dict[str, Any], said: str
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(raw))
    with pytest.raises(BadInput) as refusal:
        check(config_from_dict({"log": {"folder": str(tmp_path / "run")}, "launch": {"device": "cpu"}, **raw}), 2)
    asked = ["config", "check", str(tmp_path / "run.json"), "--from", "terrazzo", "--world", "2"]
    result = CliRunner().invoke(cli.app, asked)
    errors = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert (result.exit_code, len(errors)) == (1, 1)
    assert said in str(refusal.value) and said in errors[0]


@pytest.mark.parametrize(
    ("raw", "warned"),
    [
        ({"batch": {"global_batch": 9, "micro_batch": 2}}, "3 of 12 rows of a step are empty"),
        ({**_shared(tp=2), "model": {"heads": 4, "kv_heads": 1}}, ""),
        ({"data": {"too_long": "drop", "packing": "single"}, "plan": "zero1"}, ""),
        ({"plan": {"name": "hybrid_shard", "mesh": {"dp_replicate": None, "dp_shard": 1}}}, ""),
    ],
    ids=["a batch that is filled up", "a key head that ranks share", "documents of their own", "groups for all ranks"],
)
def test_config_check_passes_what_training_does(tmp_path: Path, raw: dict[str, Any], warned: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps(raw))
    check(config_from_dict({"log": {"folder": str(tmp_path / "run")}, "launch": {"device": "cpu"}, **raw}), 2)
    asked = ["config", "check", str(tmp_path / "run.json"), "--from", "terrazzo", "--world", "2"]
    result = CliRunner().invoke(cli.app, asked)
    warnings = [line for line in result.output.splitlines() if line.startswith("warning: ")]
    assert (result.exit_code, len(warnings)) == (0, bool(warned)), result.output
    assert all(warned in line for line in warnings)


def test_config_check_needs_no_tokenizer_to_know_names(tmp_path: Path) -> None:
    raw = {"data": {"tokenizer": "elsewhere"}, "plan": {"units": ["Blcok"]}}
    told = [str(refusal) for _, refusal in refusals(config_from_dict(raw))]
    assert len(told) == 1 and "'Blcok' matches no module" in told[0]


def test_what_a_stage_of_a_pipeline_has_not_is_looked_up_in_the_whole_model(tmp_path: Path) -> None:
    mesh = {"units": ["blocks.*"], "mesh": {"pp": 2}}
    raw = {"log": {"folder": str(tmp_path)}, "launch": {"device": "cpu"}, "plan": mesh}
    check(config_from_dict({**raw, "optimizer": {"no_decay": ["blocks.0.attention.query.weight"]}}), 2)


def test_a_seed_is_one_that_generators_take() -> None:
    with pytest.raises(BadInput, match=r"train\.seed is 18446744073709551616, expected a number below 9"):
        config_from_dict({"train": {"seed": 2**64}})
