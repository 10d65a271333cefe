"""When checkpoints are written: never, at the end, or every so many steps, in every dialect that decides it."""

from __future__ import annotations

from typing import Any

import pytest

from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.convert import Conversion
from terrazzo.dialects.verbs.understand import read_document
from tests.dialects.peers import converted

RUN: dict[str, dict[str, Any]] = {
    "terrazzo": {"plan": {"name": "zero3", "units": ["Block"]}, "train": {"steps": 1000}},
    "torchtitan": {"training": {"steps": 1000, "local_batch_size": 2}},
    "trainer": {"output_dir": "out", "max_steps": 1000},
    "megatron": {"micro-batch-size": 2, "train-iters": 1000, "lr": 1e-4},
    "lightning": {"strategy": "ddp", "max_steps": 1000},
}
AT_END: dict[str, dict[str, Any]] = {
    "terrazzo": {"checkpoint": {"folder": "ckpt", "save_format": "hf"}},
    "torchtitan": {"checkpoint": {"enable": True, "folder": "ckpt", "interval": 1000, "last_save_in_hf": True}},
    "trainer": {"save_steps": 1000},
    "megatron": {"save": "ckpt", "save-interval": 1000},
    "lightning": {
        "callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1000, "dirpath": "ckpt"}}]
    },
}
OFF: dict[str, dict[str, Any]] = {
    "torchtitan": {"checkpoint": {"enable": False, "folder": "ckpt", "interval": 5, "last_save_in_hf": True}},
    "trainer": {"save_strategy": "no"},
    "megatron": {"save-interval": 5},
    "lightning": {"enable_checkpointing": False},
}

CLIPPED = {"training.clip"}
"""Lightning's FSDPStrategy refuses what torchtitan does by default."""


def kinds(conversion: Conversion) -> dict[str, str]:
    return {each.key: each.kind for each in conversion.verdicts}


def section(conversion: Conversion, name: str) -> dict[str, Any]:
    return dict(conversion.document.get(name, {}))


@pytest.mark.parametrize("source", AT_END)
@pytest.mark.parametrize("target", AT_END)
def test_the_checkpoint_at_the_end_is_one_everywhere(source: str, target: str) -> None:
    conversion = converted(source, target, RUN[source] | AT_END[source], world=8)
    assert {each.key for each in conversion.refused} <= CLIPPED
    assert "saving.when" not in {each.key for each in conversion.unsaid}
    after = conversion.after
    assert after.value("saving.when") == "end" or after.value("saving.every") == 1000


def test_an_export_is_of_a_checkpoint_that_is_written() -> None:
    titan = section(converted("terrazzo", "torchtitan", RUN["terrazzo"] | AT_END["terrazzo"]), "checkpoint")
    assert titan == {"enable": True, "folder": "ckpt", "interval": 1000, "last_save_in_hf": True, "keep_latest_k": 2}
    stage3 = {"zero_stage": 3, "zero3_save_16bit_model": True, "gradient_clipping": 1.0}
    accelerate = {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": stage3}
    titan = section(converted("accelerate", "torchtitan", accelerate), "checkpoint")
    assert titan["last_save_in_hf"] is True and titan["enable"] is True


@pytest.mark.parametrize("source", OFF)
@pytest.mark.parametrize("target", OFF)
def test_what_is_off_stays_off_and_stops_no_conversion(source: str, target: str) -> None:
    conversion = converted(source, target, RUN[source] | OFF[source], world=8)
    assert {each.key for each in conversion.refused} <= CLIPPED
    assert conversion.after.value("saving.when") == "never"
    assert {"save", "checkpoint"}.isdisjoint(conversion.document) or source == target


@pytest.mark.parametrize(("source", "key"), [("torchtitan", "checkpoint.enable"), ("trainer", "save_strategy")])
def test_terrazzo_says_that_it_saves_at_the_end_all_the_same(source: str, key: str) -> None:
    conversion = converted(source, "terrazzo", RUN[source] | OFF[source], world=8)
    (told,) = [each for each in conversion.verdicts if each.key == key]
    assert told.kind == "lossy" and "at the end of the run" in told.why


def test_what_torchtitan_ignores_where_checkpoints_are_off_is_written_nowhere() -> None:
    conversion = converted("torchtitan", "terrazzo", RUN["torchtitan"] | OFF["torchtitan"])
    told = kinds(conversion)
    idle = {key for key, kind in told.items() if key.startswith("checkpoint.") and kind == "defaulted"}
    assert idle == {"checkpoint.folder", "checkpoint.interval", "checkpoint.last_save_in_hf"}
    assert "checkpoint" not in conversion.document


@pytest.mark.parametrize("target", ["torchtitan", "trainer"])
def test_an_interval_that_is_found_while_running_is_none_elsewhere(target: str) -> None:
    source = RUN["terrazzo"] | {"checkpoint": {"every": "auto"}}
    (told,) = [each for each in converted("terrazzo", target, source).verdicts if each.key == "checkpoint.every"]
    assert told.kind == "lossy" and "how often" in told.why


def test_an_interval_as_long_as_the_run_is_the_end() -> None:
    reading = read_document(dialect("trainer"), RUN["trainer"] | {"save_steps": 400}, ReadingContext())
    assert reading.description.value("saving.when") == "steps"
    conversion = converted("trainer", "terrazzo", RUN["trainer"] | {"save_steps": 400})
    assert section(conversion, "checkpoint")["every"] == 400
