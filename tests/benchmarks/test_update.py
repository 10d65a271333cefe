"""Updates: their arithmetic, their report, and one small real run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.update import FLOOR, MODELS, OWN, PEER, Effort, Update, measure, ratio, slower, table, targets

EFFORT = Effort(rounds=(("tiny", 2),), contenders=(FLOOR, PEER, OWN, "terrazzo-zero1"))


def test_an_update_takes_as_long_as_on_the_slower_rank() -> None:
    ranks = [[Update(1.0, 5.0), Update(3.0, 4.0)], [Update(2.0, 3.0), Update(1.0, 6.0)]]
    assert slower(ranks) == [Update(2.0, 5.0), Update(3.0, 6.0)]


def test_ratios_are_of_step_and_clip_within_a_round() -> None:
    own = [Update(9.0, 1.0), Update(9.0, 2.0), Update(9.0, 9.0)]
    peer = [Update(1.0, 2.0), Update(1.0, 4.0), Update(1.0, 3.0)]
    assert ratio(own, peer) == 0.5


def test_models_are_of_many_small_tensors_and_of_few_large_ones() -> None:
    small, large = ([p.numel() for p in MODELS[name].model().parameters()] for name in ("small", "tiny"))
    assert len(small) == 1002
    assert max(small) < 20_000
    assert len(large) < 50


def _record(contenders: dict[str, float | None]) -> dict[str, Any]:
    found = {name: {"step_s": 0.01, "clipped_s": 0.02, "ratio": value} for name, value in contenders.items()}
    model = {"about": "two tensors", "tensors": 2, "elements": 1_000_000, "contenders": found}
    return {"models": {"small": model}, "not_installed": ["deepspeed-1"]}


def test_the_table_gives_times_per_tensor_and_per_element() -> None:
    text = table(_record({OWN: 0.1}))
    assert text.splitlines()[2] == "| small | terrazzo-zero3 | 5000.0 | 10000.0 | 10.00 | 20.00 | 0.10 |"
    assert "Not installed: deepspeed-1." in text


def test_the_target_is_one_of_small_tensors() -> None:
    assert [(limit, value) for _, limit, value in targets(_record({OWN: 0.1}))] == [(0.2, 0.1)]
    assert [value for _, _, value in targets({"models": {}})] == [None]


@pytest.mark.long
@pytest.mark.processes
def test_contenders_take_turns_on_two_ranks() -> None:
    record = measure(EFFORT)
    found = record["models"]["tiny"]["contenders"]
    assert list(found) == [FLOOR, PEER, OWN, "terrazzo-zero1"]
    assert all(len(of["updates"]) == 2 and 0 < of["step_s"] < of["clipped_s"] for of in found.values())
    assert record["not_installed"] == []
