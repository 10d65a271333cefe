"""Agreement of ranks once they have run a pass: on the program, and on which gradients there are.

After a training forward whose order is not settled they compare what they ran, and the merged list is the program from
then on. At the end of a step's last backward they hear which parameters got a gradient on any rank, to which units one
came too late, and whether a rank has left the program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from typing import Protocol

from torch import nn

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.buckets.unit_layout import UnitLayout
from terrazzo.engine.consensus.number_rows import number_rows
from terrazzo.engine.consensus.pass_end import MEETING_NUMEL, meet, words_numel
from terrazzo.engine.labels.label import Label, labelled
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.plan.moves import GradientFate
from terrazzo.engine.progress.training_progress import Progress
from terrazzo.engine.schedule.backward import BackwardPass
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.engine.schedule.visits import Event, Visit, merge
from terrazzo.marks import SHARES_MATRICES, SHARES_SEQUENCES

__all__ = ["Agreement", "exchanges_flags", "flags_numel"]


class _ActivationRanks(Protocol):
    """Ranks that modules exchange activations with, along an axis of their own."""

    def compare(self, before: Label) -> None:
        """Compare what was exchanged, where messages do not say what it is. Collective there.

        Raises:
            RanksApart: where it differs.
        """


class Agreement:
    """The agreement of one model's ranks; each method is collective, and blocks.

    What its modules exchange of activations is compared, too.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], schedule: Schedule, axes: Axes, progress: Progress
    ) -> None:
        self._units, self._schedule, self._axes, self._progress = units, schedule, axes, progress
        shared = (*SHARES_MATRICES.all_in(model), *SHARES_SEQUENCES.all_in(model))
        self._activations: Sequence[_ActivationRanks] = [*dict.fromkeys(shared)]

    def agree_on_order(self, label: Label) -> None:
        """Compare what the ranks ran, and make it the program; see `Order`.

        Args:
            label: of the end of the forward.
        """
        program, axes = self._schedule.program, self._axes
        numbers = _encoded(program.visits, program.recomputed)
        with labelled(label):
            alike = not axes.differing({"program": numbers}, axes.within_stage)
            rows = [numbers] if alike else number_rows(axes, numbers, axes.within_stage)
        ranks = [_decoded(row) for row in rows]
        for _, recomputed in ranks:
            program.join(recomputed)
        program.follow(merge([visits for visits, _ in ranks]))

    def agree_on_gradients(self, backward: BackwardPass) -> None:
        """Agree on gradients, once a backward has run its program to the end.

        Raises:
            RanksApart: if the ranks have not run the same.
        """
        if not exchanges_flags(backward.fate, self._schedule):
            return
        strayed, any_late, seen = self._exchange_flags(backward)
        if backward.fate is not GradientFate.FINISHED:
            return  # ranks that have not run the same have heard it
        left = iter(seen)
        for bucket in _trainable(self._units):
            bucket.gradient.agree_on_seen(islice(left, len(bucket.members)))
        for unit in (unit for unit in self._units if any_late[unit.index]):
            backward.start_reducing(unit)
        for program in self._schedule.programs if strayed else ():
            program.doubt()

    def _exchange_flags(self, backward: BackwardPass) -> tuple[bool, list[bool], list[bool]]:
        """Reduce flags over ranks: has any left the order, had a unit late, seen a gradient of a parameter?"""
        own_late = [unit.index in backward.late for unit in self._units]
        own_seen = [bool(flag) for bucket in _trainable(self._units) for flag in bucket.gradient.seen]
        own = [any(program.strayed for program in self._schedule.programs), *own_late, *own_seen]
        _, (strayed, *flags) = meet(self._axes, self._progress, backward.end_label, flags=own)
        for ranks in self._activations:
            ranks.compare(backward.end_label)
        return strayed, flags[: len(own_late)], flags[len(own_late) :]


def exchanges_flags(fate: GradientFate, schedule: Schedule) -> bool:
    """Whether `Agreement.agree_on_gradients` exchanges anything, behind a backward whose gradients have that fate."""
    return fate is GradientFate.FINISHED or (fate is GradientFate.REDUCED and schedule.meet is None)


def flags_numel(units: Sequence[UnitLayout]) -> int:
    """int64 elements that `Agreement.agree_on_gradients` exchanges over every axis."""
    members = sum(len(bucket.members) for unit in units for bucket in unit.trainable())
    return MEETING_NUMEL + words_numel(1 + len(units) + members)


def _encoded(visits: Sequence[Visit], recomputed: Collection[tuple[int, int]]) -> list[int]:
    """Numbers that stand for visits, after their count, and for pairs of units that are recomputed in one region."""
    return [len(visits), *chain.from_iterable(visits), *chain.from_iterable(sorted(recomputed))]


def _decoded(numbers: Sequence[int]) -> tuple[list[Visit], list[tuple[int, int]]]:
    """Visits and pairs of units that `_encoded` numbers stand for."""
    count, *flat = numbers
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    return [(unit, Event(event)) for unit, event in pairs[:count]], pairs[count:]


def _trainable(units: Iterable[Unit]) -> list[Bucket]:
    return [bucket for unit in units for bucket in unit.trainable()]
