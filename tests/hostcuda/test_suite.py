"""The benchmark of steps on this device: one cell of it, for real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.timeline.estimate import planned_s
from benchmarks.timeline.machines import Cell
from benchmarks.timeline.model import DEPTH, WIDTH
from benchmarks.timeline.outcome import Outcome
from tests.hostcuda.ranks import Ranks

pytestmark = pytest.mark.xdist_group("hostcuda")  # ranks stay for the next test

CELL = Cell("host", "H100", 2048)


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
