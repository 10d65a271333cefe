"""A document read key by key: what becomes of a key does not depend on the order in which its parts are looked at."""

from __future__ import annotations

import itertools
import time

import pytest

from terrazzo.dialects.core.description import Setting
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.key_verdict import KeyVerdict, VerdictKind
from terrazzo.dialects.core.keys import Key, integer
from terrazzo.dialects.core.reader import IDLE, Reader
from terrazzo.dialects.registry import NAMES, dialect

WORDS: list[tuple[VerdictKind, VerdictKind]] = [("refused", "applied"), ("lossy", "renamed"), ("renamed", "applied")]


@pytest.mark.parametrize(("graver", "milder"), WORDS)
def test_the_gravest_verdict_on_a_key_stands(graver: VerdictKind, milder: VerdictKind) -> None:
    for kinds in itertools.permutations((graver, milder)):
        reader = Reader({"key": 1}, "a library")
        for kind in kinds:
            reader.mark("key", kind, f"it is {kind}")
        assert (reader.verdicts["key"].kind, reader.verdicts["key"].why) == (graver, f"it is {graver}")


def test_the_gravest_verdict_on_a_setting_stands() -> None:
    description = dialect("terrazzo").read({"train": {"steps": 3}}).description
    for refused_first in (True, False):
        draft = Draft(description, "a library", "another")
        if refused_first:
            draft.refuse("schedule.total_steps", "no")
        draft.put("schedule.total_steps", "steps", 3)
        if not refused_first:
            draft.refuse("schedule.total_steps", "no")
        (verdict,) = [each for each in draft.finish().verdicts if each.key == "schedule.total_steps"]
        assert verdict.kind == "refused"


def test_values_are_parsed_and_under_todays_spelling() -> None:
    section = {"enabled": "true", "check_grad_overflow": "FALSE"}
    document = {"bfloat16": section, "steps_per_print": 5, "communication_data_type": None}
    assert dialect("deepspeed").read(document).values == {
        "bf16.enabled": True,
        "bf16.check_grad_overflow": False,
        "steps_per_print": 5,
        "communication_data_type": None,
    }


def test_a_key_that_has_become_a_setting_stays_one_that_tunes() -> None:
    reader = Reader({"key": 1}, "a library")
    reader.verdicts["key"] = KeyVerdict("key", 1, "defaulted", tuning=True)
    reading = reader.finish("terrazzo", {"training.seed": Setting(1, "file", "key")})
    assert reading.verdicts == (KeyVerdict("key", 1, "defaulted", "training.seed", tuning=True),)


def test_a_key_that_became_nothing_is_harmless_at_its_default_or_with_a_word() -> None:
    rows = {name: Key(integer(), 1, "a number") for name in ("usual", "told", "lost")}
    reader = Reader({"usual": 1, "told": 2, "lost": 2}, "a library", keys=rows)
    for name in rows:
        reader.take(name)
    reader.mark("told", "defaulted", "another key says it")
    losses = {extra.key: (extra.loss, extra.why) for extra in reader.finish("terrazzo", {}).description.extras}
    assert losses == {
        "usual": ("harmless", ""), "told": ("harmless", "another key says it"), "lost": ("lossy", IDLE)
    }  # fmt: skip


def test_true_is_no_number_of_a_choice() -> None:
    row = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": True, "fsdp_version": True}}
    refused = {verdict.key for verdict in dialect("accelerate").read(row).verdicts if verdict.kind == "refused"}
    assert refused == {"fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_version"}
    lightning = {"strategy": {"class_path": "ModelParallelStrategy", "init_args": {"save_distributed_checkpoint": 1}}}
    assert [each.kind for each in dialect("lightning").read(lightning).verdicts] == ["applied", "refused"]


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_key_has_a_verdict(name: str) -> None:
    kinds = {each.key: each.kind for each in dialect(name).read({"": 3, "a": {"": 1, "b": 2}}).verdicts}
    assert set(kinds) == {'""', 'a.""', "a.b"} and kinds['""'] == "refused"


def test_a_wrong_value_is_refused_though_its_key_is_kept() -> None:
    (verdict,) = dialect("trainer").read({"num_train_epochs": "many"}).verdicts
    assert verdict.kind == "refused" and "'many'" in verdict.why


def test_of_many_strangers_the_first_few_are_held_against_known_keys() -> None:
    """Two thousand of them took Megatron's reader, which knows most keys, 19 seconds, and takes half of one."""
    start = time.process_time()
    refused = dialect("megatron").read({f"unknown_key_{number}": 1 for number in range(2000)}).verdicts
    assert {each.kind for each in refused} == {"refused"} and len(refused) == 2000
    assert time.process_time() - start < 8
