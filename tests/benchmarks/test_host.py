"""Host time: its arithmetic, its report, and one small real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.host import OWN, PEER, Effort, FakeTime, Step, Turn, measure, ratio, table, targets, units_of
from tests.helpers.fake import fake_group

EFFORT = Effort(rounds=((8, 1),), steps=2, warmup=1, models=("decoder",))


def _turn(plain_s: list[float], sharded_s: list[float]) -> Turn:
    return Turn("small", 8, OWN, *([Step(s, 0.0, 0.0) for s in times] for times in (plain_s, sharded_s)))


def test_host_time_is_what_is_above_the_plain_step() -> None:
    assert _turn([1.0, 9.0, 2.0], [4.0, 3.0, 5.0]).above_plain_s() == 2.0


def test_ratios_are_taken_within_a_round() -> None:
    own = [_turn([1.0], [2.0]), _turn([2.0], [4.0]), _turn([1.0], [5.0])]
    peer = [_turn([1.0], [3.0]), _turn([2.0], [6.0]), _turn([1.0], [2.0])]
    assert ratio(own, peer) == 0.5
    assert ratio(own, []) is None


def test_a_unit_is_a_block_or_the_root() -> None:
    assert units_of("small") == 21


def test_time_inside_the_fake_group_is_counted_and_the_group_left_as_it_was() -> None:
    before = dict(vars(dist.ProcessGroup))
    fake = FakeTime()
    with fake_group(512):
        with fake.counting():
            dist.all_reduce(torch.ones(1))
        counted = fake.seconds
        dist.all_reduce(torch.ones(1))
    assert 0 < counted == fake.seconds
    assert dict(vars(dist.ProcessGroup)) == before


def _record(value: float | None) -> dict[str, Any]:
    times = {"above_plain_s": 0.021, "above_plain_s_per_unit": 0.001, "pass_s": 0.1, "update_s": 0.002, "fake_s": 0.0}
    contenders = {OWN: times} if value is None else {OWN: times, PEER: times}
    cell = {"model": "small", "plain_pass_s": 0.03, "plain_update_s": 0.009, "contenders": contenders, "ratio": value}
    return {
        "medians": [{**cell, "ranks": 8}, {**cell, "ranks": 512}],
        "models": {"small": {"units": 21, "about": "thousand tensors"}},
        "not_installed": [PEER] if value is None else [],
    }


def test_the_table_gives_units_and_ratios() -> None:
    text = table(_record(0.3))
    assert text.splitlines()[2] == "| small | 8 | terrazzo-zero3 | 21.0 | 1000 | 0.30 | 30.0 | 2.00 (plain 9.00) |"
    assert "| small | 512 | fsdp2 | 21.0 | 1000 | 1.00 |" in text
    assert "Not installed: fsdp2." in table(_record(None))


def test_only_the_small_job_decides_the_target() -> None:
    assert [(limit, value) for _, limit, value in targets(_record(0.3))] == [(0.4, 0.3)]
    assert [value for _, _, value in targets(_record(None))] == [None]


@pytest.mark.long
@pytest.mark.processes
def test_an_engine_takes_host_time() -> None:
    record = measure(EFFORT)
    cell = record["medians"][0]
    assert set(cell["contenders"]) == {OWN, PEER}
    assert all(found["fake_s"] > 0 for found in cell["contenders"].values())  # a difference may be anything under load
    assert len(record["turns"]) == 2
    assert len(record["turns"][0]["sharded"]) == 2
