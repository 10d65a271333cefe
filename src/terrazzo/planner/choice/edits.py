"""Which changes are proposed where something does not fit: of each kind the smallest that helps, and its cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from terrazzo.engine import MOMENTS_NAMES
from terrazzo.errors import BadInput
from terrazzo.planner.choice.ranking import NOISE
from terrazzo.planner.report.estimates import Edit, Estimate

__all__ = ["Changed", "Kinds", "best_edits", "first_that_fits", "times_text"]

T = TypeVar("T")

SHOWN_EDITS = 3
"""Edits that leave every value as it is, one with more GPUs among them."""


class Changed(NamedTuple, Generic[T]):
    """Options of the command line, and what they make of a request or of another description of a run."""

    options: str
    made: T


@dataclass(frozen=True)
class Kinds(Generic[T]):
    """Changes of a setup by kind; the smallest of each kind comes first.

    Attributes:
        alone: each of which may be enough; together: which are tried where none of those surely is.
        narrower: states in fewer bits; larger: more GPUs.
    """

    alone: Iterable[Iterator[Changed[T]]]
    together: Iterable[Iterator[Changed[T]]]
    narrower: Iterator[Changed[T]]
    larger: Iterator[Changed[T]]


def best_edits(kinds: Kinds[T], misfit: Estimate, estimate: Callable[[T], Estimate]) -> tuple[Edit, ...]:
    """The first change of each kind that fits: the fastest of them, one that rounds states, and one with more GPUs."""
    edits = [edit for kind in kinds.alone for edit in first_that_fits(kind, misfit, estimate)]
    if not any(edit.estimate.memory.fits_surely for edit in edits):
        together = [edit for kind in kinds.together for edit in first_that_fits(kind, misfit, estimate)]
        edits += [edit for edit in together if edit.estimate.memory.fits_surely or not edits]
    edits = sorted((edit for edit in edits if not _beaten(edit, edits)), key=_order)
    rounded = [edit for edit in first_that_fits(kinds.narrower, misfit, estimate) if _is_faster(edit, edits)]
    larger = first_that_fits(kinds.larger, misfit, estimate)
    return (*edits[: SHOWN_EDITS - len(larger)], *rounded, *larger)


def _cost_of(edited: Estimate, before: Estimate) -> str:
    """What a change takes, against a setup as it would run if there were room for it."""
    costs = []
    if edited.time and before.time:
        change = edited.time.tokens_per_s_per_gpu / before.time.tokens_per_s_per_gpu - 1
        costs.append("as fast" if abs(change) < 0.005 else f"{change:+.0%} tokens/s per GPU")
    kept, before_kept = edited.setup.precision, before.setup.precision
    if kept.moments != before_kept.moments:
        costs.append(f"moments in {MOMENTS_NAMES[kept.moments]}")
    if kept.accumulate != before_kept.accumulate:
        costs.append(f"gradients in {MOMENTS_NAMES[kept.accumulate]}")
    factor = edited.setup.cluster.count / before.setup.cluster.count
    if factor != 1:
        costs.append(times_text(factor, "the GPUs"))
    batch = edited.setup.global_batch / before.setup.global_batch
    if batch != 1:
        costs.append(times_text(batch, "the sequences in a step"))
    for room in edited.memory.rooms[1:]:
        kind = {"host": "host memory", "disk": "disk"}[room.name]
        known = "" if room.capacity is not None else ", if it has as much"
        costs.append(f"{room.expected / 2**30:,.0f} GiB of {kind} on each host{known}")
    return ", ".join(costs)


_PARTS = {1 / 2: "half", 1 / 3: "a third of", 1 / 4: "a quarter of", 1 / 8: "an eighth of"}


def times_text(factor: float, what: str) -> str:
    """`4 times the GPUs`, or of a part `half the GPUs`."""
    if factor >= 1:
        return f"{factor:g} times {what}"
    return f"{_PARTS.get(factor, f'{factor:.2g} of')} {what}"


def first_that_fits(
    changes: Iterable[Changed[T]], misfit: Estimate, estimate: Callable[[T], Estimate | None]
) -> list[Edit]:
    """The first with which it surely fits, or else as expected; none where it never does, or `estimate` finds none."""
    expected: list[Edit] = []
    for options, changed in changes:
        try:
            other = estimate(changed)
        except BadInput:  # such as a batch that does not factor on so many ranks
            continue
        if other is None or not other.memory.fits or any(each.severity == "refuse" for each in other.findings):
            continue
        edit = Edit(options, other, _cost_of(other, misfit))
        if other.memory.fits_surely:
            return [edit]
        expected = expected or [edit]
    return expected


def _order(edit: Edit) -> tuple[float, ...]:
    time = edit.estimate.time
    unsure = float(edit.estimate.memory.fits_surely is False)
    return (unsure, -time.tokens_per_s_per_gpu if time else edit.estimate.memory.expected_bytes)


def _beaten(edit: Edit, edits: Sequence[Edit]) -> bool:
    """Whether it only fits as expected, and another that surely does is as fast."""
    if edit.estimate.memory.fits_surely is not False:
        return False
    sure = [other.estimate for other in edits if other.estimate.memory.fits_surely]
    return any(_speed(other) >= _speed(edit.estimate) for other in sure)


def _is_faster(edit: Edit, edits: Sequence[Edit]) -> bool:
    """Whether it is clearly faster than all of these that surely fit."""
    sure = [other.estimate for other in edits if other.estimate.memory.fits_surely]
    return all(_speed(edit.estimate) > (1 + NOISE) * _speed(other) for other in sure)


def _speed(estimate: Estimate) -> float:
    return estimate.time.tokens_per_s_per_gpu if estimate.time else 0.0
