"""The allocator's benchmark: ranks on the simulated device, a record, and what the report makes of it."""

from __future__ import annotations

import json
from math import ceil
from statistics import median
from typing import Any

import pytest

import hostcuda
from benchmarks.allocator.__main__ import RESULTS, measure
from benchmarks.allocator.jobs import JOBS, LAYERS, LONGEST, MODEL, RANKS, SCALE, Job
from benchmarks.allocator.report import report, shares
from terrazzo.engine.plan.place import ROWS
from terrazzo.planner import Request, build_setup
from terrazzo.planner.memory.overheads import RESERVE, RESTING_RESERVE, ROOMY_RESERVE
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.memory.states import STATE_OF

why = hostcuda.obstacle()
RECORD: dict[str, Any] = json.loads((RESULTS / "record.json").read_text())


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(why is not None, reason=str(why))
def test_a_rank_is_measured_with_both_kinds_of_segments() -> None:
    record = measure([Job("zero3", steps=2)])
    (row,) = record["rows"]
    for kind in ("fixed", "expandable"):
        found = row[kind]
        assert found["requested"] <= found["allocated"] <= found["reserved"]
        assert found["requested"] <= found["least"] <= found["reserved"]
        assert len(found["reserved_after"]) == 3
    numel = LAYERS * (4 * 128 * 128 + 3 * 128 * 512 + 2 * 128) + 128 * 1001
    assert row["fixed"]["requested"] > 12 * numel // RANKS * SCALE  # a master weight and two moments of each share
    assert shares(record, "fixed")["zero3"] == row["fixed"]["reserved"] / row["fixed"]["requested"]


def test_every_row_of_the_table_is_measured() -> None:
    assert {job.plan for job in JOBS} >= set(ROWS) | {"fsdp2"}
    asked = [(job.plan, job.axes, job.steps, job.varied) for job in JOBS]
    assert asked == [(row["plan"], row["axes"], row["steps"], row["varied"]) for row in RECORD["rows"]]


def test_the_committed_report_is_that_of_the_committed_record() -> None:
    assert report(RECORD) == (RESULTS / "report.md").read_text()


def states_of(row: dict[str, Any]) -> float:
    """Bytes of the states of a row, by the planner, which counts them to the byte."""
    groups = {"dp_replicate": 2} if row["axes"] == 2 else {}
    model = {"model_type": "terrazzo", **MODEL}
    memory = memory_of(build_setup(Request(model, RANKS, gpu="h100", strategy=row["plan"], sequence=LONGEST, **groups)))
    return SCALE * sum(term.value for term in memory.terms if term.name in STATE_OF)


def test_the_planner_s_reserve_is_what_was_measured() -> None:
    """To two digits, over all rows with all tiers: with room the median, without it the most, of what is no state."""
    own = [row for row in RECORD["rows"] if row["plan"] != "fsdp2" and not row["varied"]]

    def kept(figure: str) -> list[float]:
        shares = []
        for row in own:
            found, states = row["expandable"], states_of(row)
            moving = found["requested"] - states
            shares.append((found[figure] - found["requested"] - RESTING_RESERVE * states) / moving)
        return shares

    assert round(median(kept("reserved")), 2) == ROOMY_RESERVE
    assert ceil(100 * max(kept("least"))) == round(100 * RESERVE)
