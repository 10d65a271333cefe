"""The benchmark of steps on this device: one cell of it, for real."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.timeline import bubbles
from benchmarks.timeline.estimate import planned_s
from benchmarks.timeline.machines import Cell
from benchmarks.timeline.model import DEPTH, WIDTH
from benchmarks.timeline.outcome import Outcome
from tests.hostcuda.ranks import Ranks

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test

CELL = Cell("host", "H100", 2048)
PIPELINES = {("1f1b", 1): (1 / 5, 3 / 7), ("1f1b", 2): (1 / 9, 3 / 11), ("zero_bubble", 1): (1 / 13, 1 / 5)}
"""Schedule and chunks; the idle share of two ranks and of four, by four micro-batches.

Of 1F1B (R - 1) / (M + R - 1), with c chunks (R - 1) / (c M + R - 1), and of ZB-H1 R - 1 of the 3 M + R - 1 turns in
which it computes forward, or backward to inputs or to weights.
"""


def measured(contenders: Sequence[str]) -> list[dict[str, Any]]:
    from benchmarks.timeline.measure import outcomes
    from hostcuda.device import virtual

    before = vars(virtual.LINKS).copy()
    cell = {"cell": CELL.record(), "figures": asdict(CELL.figures())}
    try:
        return list(outcomes({"mesh": {"dp_shard": 2}, "contenders": contenders, "cells": [cell]}))
    finally:
        vars(virtual.LINKS).update(before)
        virtual.set_speeds()


@pytest.mark.long
def test_times_are_those_of_the_full_size(two_ranks: Ranks) -> None:
    ranks = two_ranks.run(measured, ["fsdp2", "zero3"], timeout_s=120)
    assert ranks[0] == ranks[1]
    theirs, own = (Outcome(**found) for found in ranks[0])
    for outcome in (theirs, own):
        assert outcome.floor_s <= outcome.step_s < 1.2 * outcome.floor_s
        gathers = outcome.parts["forward"]["collectives"]["all_gather near"]
        block_s = 10 * WIDTH**2 / (0.8 * 450e9)  # half of its weights, two bytes each
        assert gathers["calls"] == DEPTH + 1
        assert gathers["longest_s"] == pytest.approx(block_s + 12e-6, rel=1e-2)
        assert gathers["total_s"] == pytest.approx(DEPTH * block_s + (DEPTH + 1) * 12e-6, rel=1e-2)
    assert own.step_s == pytest.approx(planned_s(CELL, "zero3"), rel=0.25)


def idle(ranks: int, layouts: Sequence[str]) -> dict[str, list[float]]:
    from benchmarks.timeline import staged
    from hostcuda.device import virtual

    before = vars(virtual.LINKS).copy()
    found = defaultdict(list)
    try:
        for job in bubbles.jobs():
            cells = [cell for cell in job["cells"] if cell["cell"]["layout"] in layouts]
            if job["ranks"] == ranks:
                for outcome in staged.stages({**job, "micro_batches": [4], "cells": cells}):
                    found[outcome["layout"]].append(outcome["idle"])
        return dict(found)
    finally:
        vars(virtual.LINKS).update(before)
        virtual.set_speeds()


@pytest.mark.long
def test_two_stages_wait_as_long_as_their_schedules_say(two_ranks: Ranks) -> None:
    for found in two_ranks.run(idle, 2, ["free"], timeout_s=120):
        assert found == {"free": pytest.approx([two for two, _ in PIPELINES.values()])}
        plain, _, zero_bubble = found["free"]
        assert zero_bubble <= 0.6 * plain


@pytest.mark.long
def test_four_stages_wait_as_long_as_their_schedules_say(four_ranks: Ranks) -> None:
    for found in four_ranks.run(idle, 4, ["free", "host", "network"], timeout_s=300):
        assert found["free"] == pytest.approx([four for _, four in PIPELINES.values()])
        for plain, _, zero_bubble in found.values():
            assert zero_bubble <= 0.6 * plain
