"""What the planner says of published runs, beside what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.planner.rows import Row
from terrazzo.errors import BadInput
from terrazzo.planner.figures import MemoryFigures, TimeFigures
from terrazzo.planner.memory.peak import memory_of
from terrazzo.planner.setup.checks import check
from terrazzo.planner.timing.step import time_of

__all__ = ["Outcome", "Summary", "Sweep", "by_family", "outcomes", "summary", "sweeps"]


@dataclass(frozen=True)
class Outcome:
    """A row with its estimate. `refused` says why the planner would not plan a run that took place, if it would not."""

    row: Row
    memory: MemoryFigures
    time: TimeFigures | None
    refused: str = ""

    @property
    def memory_bytes(self) -> float:
        """What is expected of the quantity and the stage that the row measured."""
        if self.row.memory_kind == "reserved":
            return self.memory.reserved_bytes
        if self.row.memory_kind == "device":
            return self.memory.device_bytes
        if self.row.stage is not None and self.memory.per_pp_rank:
            return self.memory.per_pp_rank[self.row.stage]
        return self.memory.allocated_bytes

    @property
    def memory_error(self) -> float:
        """Relative; positive if more was expected than measured."""
        return self.memory_bytes / _known(self.row.memory_bytes) - 1

    @property
    def above_upper(self) -> bool:
        """Whether more was measured than the upper bound. It is one of the fullest rank, whichever was measured."""
        return _known(self.row.memory_bytes) > self.memory.upper_bytes

    @property
    def step_error(self) -> float:
        """Relative; positive if a longer step was expected than measured."""
        return (self.time.step_s if self.time else 0.0) / _known(self.row.step_s) - 1


@dataclass(frozen=True)
class Summary:
    """Relative errors in short: median and 90th percentile of their sizes, and the median with its sign."""

    n: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True)
class Sweep:
    """Rows between which a user would choose. `regret`: throughput lost by taking the row that is expected best."""

    family: str
    name: str
    n: int
    regret: float


def outcomes(rows: Iterable[Row]) -> list[Outcome]:
    """Every row estimated, without calibration."""
    return [_outcome(row) for row in rows]


def summary(errors: Sequence[float]) -> Summary:
    """Raises: `ValueError` if there are none."""
    sizes = sorted(abs(error) for error in errors)
    return Summary(len(sizes), median(sizes), sizes[max(0, -(-9 * len(sizes) // 10) - 1)], median(errors))


def by_family(outcomes: Iterable[Outcome], keep: Callable[[Outcome], bool]) -> dict[str, list[Outcome]]:
    """The outcomes that `keep` keeps, families in order of appearance."""
    found: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if keep(outcome):
            found[outcome.row.family].append(outcome)
    return dict(found)


def sweeps(outcomes: Iterable[Outcome]) -> list[Sweep]:
    """Groups of at least two rows with the same model, devices and sequence length; of vTrain the same batch too."""
    groups: dict[tuple[Hashable, ...], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.row.step_s and outcome.time:
            groups[_question(outcome.row)].append(outcome)
    return [_sweep(question, group) for question, group in groups.items() if len(group) > 1]


def _outcome(row: Row) -> Outcome:
    try:
        check(row.setup)
        refused = ""
    except BadInput as error:
        refused = str(error)
    time = time_of(row.setup)
    return Outcome(row, memory_of(row.setup), None if isinstance(time, str) else time, refused)


def _question(row: Row) -> tuple[Hashable, ...]:
    setup = row.setup
    batch = setup.global_batch if row.family == "vtrain" else 0
    shape = (setup.model.name, setup.model.layers, setup.model.hidden)
    return row.family, *shape, setup.cluster.device.name, setup.cluster.count, setup.sequence, batch


def _sweep(question: tuple[Hashable, ...], group: Sequence[Outcome]) -> Sweep:
    chosen = max(group, key=lambda outcome: outcome.time.tokens_per_s_per_gpu if outcome.time else 0.0)
    best = max(_known(outcome.row.tokens_per_s_per_gpu) for outcome in group)
    regret = 1 - _known(chosen.row.tokens_per_s_per_gpu) / best
    return Sweep(str(question[0]), " ".join(str(part) for part in question[1:] if part), len(group), regret)


def _known(value: float | None) -> float:
    assert value is not None, "the row holds no such measurement"
    return value
