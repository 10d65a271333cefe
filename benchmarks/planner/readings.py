"""How sources that are silent were read, and what the errors would be under the other reading.

Each of these was decided with the measurements in view. Where the planner's error depends on it, the table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.planner.rows import Row
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.step import time_of

__all__ = ["READINGS", "Reading", "Result", "results"]


@dataclass(frozen=True)
class Result:
    """Median error of a family as it is read, and read otherwise."""

    family: str
    quantity: str
    read: str
    otherwise: str
    median: float
    other_median: float


@dataclass(frozen=True)
class Reading:
    """`change` turns a setup, or `measured` the measurement, into the other reading's."""

    family: str
    read: str
    otherwise: str
    change: Callable[[Setup], Setup] = lambda setup: setup
    measured: Callable[[Row], float] = lambda row: 1.0
    memory: bool = False


def results(rows: Sequence[Row]) -> list[Result]:
    """Every reading against its alternative."""
    return [_result(reading, [row for row in rows if row.family == reading.family]) for reading in READINGS]


def _half_attention(row: Row) -> float:
    """The measured step if the source's TFLOP/s count only half of attention, relative to counting all of it."""
    model = row.setup.model
    attention = 12 * model.layers * model.hidden * row.setup.sequence
    return (6 * model.matmul_numel + attention / 2) / (6 * model.matmul_numel + attention)


READINGS = (
    Reading(
        "sc21",
        "DeepSpeed's ZeRO-3 of 2021 moves each parameter by itself",
        "one message per block",
        lambda setup: replace(setup, coalesced=True),
    ),
    Reading(
        "llama3",
        "7 chunks per pipeline stage",
        "1 chunk",
        lambda setup: replace(setup, virtual_stages=1),
    ),
    Reading("llama3", "its TFLOP/s count attention in full", "by half", measured=_half_attention),
    Reading(
        "vtrain",
        "no recomputation, since 46 % of the peak would leave none",
        "full recomputation, the default of its configuration",
        lambda setup: replace(setup, checkpointing="full"),
    ),
    Reading(
        "mcore",
        "the loss works in place",
        "torch's cross-entropy",
        lambda setup: replace(setup, loss="full"),
        memory=True,
    ),
)


def _result(reading: Reading, rows: Sequence[Row]) -> Result:
    error = _memory_error if reading.memory else _step_error
    known = [row for row in rows if (row.memory_bytes if reading.memory else row.step_s)]
    kept = median(abs(error(row, row.setup, 1.0)) for row in known)
    other = median(abs(error(row, reading.change(row.setup), reading.measured(row))) for row in known)
    quantity = "memory" if reading.memory else "step time"
    return Result(reading.family, quantity, reading.read, reading.otherwise, kept, other)


def _step_error(row: Row, setup: Setup, factor: float) -> float:
    time = time_of(setup)
    assert not isinstance(time, str), time
    assert row.step_s
    return time.step_s / (row.step_s * factor) - 1


def _memory_error(row: Row, setup: Setup, factor: float) -> float:
    assert row.memory_bytes
    stage = -1 if row.stage is None else row.stage
    return memory_of(setup).per_pp_rank[stage] / (row.memory_bytes * factor) - 1
