"""Other dialects' descriptions as DeepSpeed's JSON: the loader takes it, and what it does not mean has been named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from terrazzo.dialects.core.description import PATHS, Description, asks_for_nothing
from terrazzo.dialects.core.dialect import ReadingContext, Writing
from terrazzo.dialects.formats.deepspeed.dialect import DIALECT
from terrazzo.dialects.formats.deepspeed.versions import LAST, MOVED
from tests.dialects.peers import converted
from tests.helpers.examples import examples
from tests.helpers.neutral import described, descriptions


def written(description: Description, **versions: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The document, and the kind of each setting's verdict."""
    writing: Writing = DIALECT.write(description, ReadingContext(versions=versions))
    return writing.document, {verdict.key: verdict.kind for verdict in writing.verdicts}


@settings(max_examples=examples(80), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(descriptions())
def test_what_a_written_file_does_not_mean_is_named(description: Description) -> None:
    writing = DIALECT.write(description)
    kinds = {verdict.key: verdict for verdict in writing.verdicts}
    after = DIALECT.read(json.loads(json.dumps(writing.document))).description
    for path in PATHS:
        wanted, found = description[path], after[path]
        if not wanted.is_set:
            assert path not in kinds
        elif kinds[path].kind in ("lossy", "refused"):
            assert kinds[path].why
        elif found.is_set and not asks_for_nothing(path, wanted.value) and path not in _WORLD:
            assert found.value == wanted.value, (path, kinds[path], writing.document)


# What the launcher decides, and a size that follows from two others and the number of ranks.
_WORLD = ("mesh.dp_shard", "mesh.dp_replicate", "batch.global_batch", "batch.micro_batch", "batch.accumulation")


@settings(max_examples=examples(80), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(descriptions())
def test_the_loader_takes_what_is_written(description: Description) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed's loader is the oracle: make .venv/.bench")
    from deepspeed.runtime.config import DeepSpeedConfig

    writing = DIALECT.write(description)
    document = writing.document | {verdict.target: 1 for verdict in writing.missing}
    errors = [each for each in DIALECT.findings(DIALECT.read(document), ReadingContext()) if each.level == "error"]
    DeepSpeedConfig(json.loads(json.dumps(document)))
    assert [each for each in errors if not each.text.startswith("nvme needs a folder")] == []


# -- what is written, case by case ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "stage", "kind"),
    [
        ("zero0", 0, "applied"),
        ("zero1", 1, "applied"),
        ("zero2", 2, "applied"),
        ("zero3", 3, "applied"),
        ("shard_grad_op", 2, "lossy"),
        ("hybrid_shard_zero2", 3, "lossy"),
        ("hfsdp", 3, "lossy"),
    ],
)
def test_rows_are_stages(row: str, stage: int, kind: str) -> None:
    document, kinds = written(described(row, mesh__dp_shard=8))
    assert document["zero_optimization"]["stage"] == stage
    assert kinds["sharding.weight"] == kind


@pytest.mark.parametrize(
    ("split", "stage"), [("weight", 3), ("grad", 2), ("optim", 1)], ids=["weights", "gradients", "states"]
)
def test_a_row_without_a_name_is_the_stage_that_splits_as_much(split: str, stage: int) -> None:
    places = {f"sharding__{state}": "S" if state == split else "-" for state in ("weight", "between", "grad", "optim")}
    description = described(None, **places)
    assert description.row is None
    document, kinds = written(description)
    assert document["zero_optimization"]["stage"] == stage
    assert kinds["sharding.weight"] == "lossy"


def test_hybrid_shard_was_mics_as_long_as_deepspeed_had_it() -> None:
    """The same row in two releases: exact before 0.19.7, and the nearest thing after it."""
    description = described("hybrid_shard", mesh__dp_shard=8, mesh__dp_replicate=2)
    before, kinds_before = written(description, deepspeed="0.18.9")
    after, kinds_after = written(description, deepspeed="0.19.8")
    assert before["zero_optimization"] == {"stage": 3, "mics_shard_size": 8}
    assert after["zero_optimization"] == {"stage": 3, "zero_hpz_partition_size": 8}
    assert (kinds_before["sharding.optim"], kinds_after["sharding.optim"]) == ("applied", "lossy")


def test_a_share_of_units_is_a_ratio_at_stage_3_alone() -> None:
    tiers = {"offload__optim": "cpu:0.7", "offload__grad": "cpu:0.7"}
    document, kinds = written(described("zero3", **tiers))
    assert document["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "ratio": 0.7}
    assert kinds["offload.optim"] == "applied"
    document, kinds = written(described("zero2", **tiers))
    assert document["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert kinds["offload.optim"] == "lossy"


def test_dtypes_that_differ_from_deepspeeds_own_are_written() -> None:
    """Torchtitan's recipe: bf16 weights, everything of gradients in fp32."""
    dtypes = dict.fromkeys(("reduce", "accumulate", "master", "moments"), "fp32")
    recipe = {f"precision__{name}": kind for name, kind in {**dtypes, "weight": "bf16", "compute": "bf16"}.items()}
    document, kinds = written(described("zero3", **recipe))
    assert document["bf16"] == {"enabled": True}
    assert document["communication_data_type"] == "fp32"
    assert document["data_types"] == {"grad_accum_dtype": "fp32"}
    assert {kinds[path.replace("__", ".")] for path in recipe} == {"applied"}


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("version", ["0.18.2", LAST])
def test_a_file_means_the_same_to_releases_with_other_defaults(version: str, clip: float | None, pinned: bool) -> None:
    tiers = {"offload__optim": "cpu", "offload__weight": "cpu"}
    document, _ = written(described("zero3", training__clip=clip, offload__pin=pinned, **tiers), deepspeed=version)
    for reader in ("0.18.2", "0.19.3", LAST):
        context = ReadingContext(versions={"deepspeed": reader})
        reading = DIALECT.read(document, context)
        assert [reading.description.value(path) for path in ("training.clip", "offload.pin")] == [clip, pinned]
        assert {each.key for each in DIALECT.findings(reading, context)}.isdisjoint(MOVED)


def test_bf16_without_zero_was_summed_in_fp32() -> None:
    sums = {"precision__compute": "bf16", "precision__weight": "bf16", "precision__accumulate": "fp32"}
    before, kinds_before = written(described("zero0", **sums), deepspeed="0.17.5")
    _, kinds = written(described("zero0", **sums), deepspeed="0.17.6")
    assert "data_types" not in before
    assert (kinds_before["precision.accumulate"], kinds["precision.accumulate"]) == ("applied", "lossy")


def test_ddp_with_autocast_reduces_in_fp32() -> None:
    fp32 = {f"precision__{name}": "fp32" for name in ("weight", "reduce", "master", "accumulate")}
    document, kinds = written(described("zero0", precision__autocast=True, precision__compute="bf16", **fp32))
    expected = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert document["torch_autocast"] == expected
    assert set(kinds.values()) == {"applied"}


def test_adam_is_not_adamw() -> None:
    document, _ = written(described(optimizer__name="Adam", optimizer__weight_decay=0.1))
    assert document["optimizer"] == {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}
    assert DIALECT.read(document).description.value("optimizer.name") == "Adam"
    assert DIALECT.read({"optimizer": {"type": "Adam"}}).description.value("optimizer.name") == "AdamW"


@pytest.mark.parametrize(("name", "kind"), [("linear", "WarmupDecayLR"), ("cosine", "WarmupCosineLR")])
def test_schedules(name: str, kind: str) -> None:
    schedule = {"schedule__name": name, "schedule__warmup_steps": 20, "schedule__total_steps": 200}
    document, kinds = written(described(optimizer__name="AdamW", optimizer__lr=3e-4, **schedule))
    assert document["scheduler"]["type"] == kind
    assert document["scheduler"]["params"]["warmup_type"] == "linear"
    assert kinds["schedule.warmup_steps"] == "applied"
    after = DIALECT.read(document).description
    assert [after.value(path) for path in ("schedule.name", "optimizer.lr")] == [name, 3e-4]
    assert written(described(schedule__name="wsd"))[1]["schedule.name"] == "refused"


@pytest.mark.parametrize("warmup", [0, 10])
def test_the_length_of_a_run_with_a_constant_rate_is_not_lost_in_silence(warmup: int) -> None:
    document = {"schedule": {"name": "constant", "warmup_steps": warmup}, "train": {"steps": 80}}
    verdicts = {each.key: each for each in converted("terrazzo", "deepspeed", document).verdicts}
    assert verdicts["train.steps"].kind == "lossy" and "length of the run" in verdicts["train.steps"].why
