"""Modules that exchange rows with other ranks in the middle of a pass: they are given where this rank is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.numbered import Names
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.marks import SHARES_EXPERTS

__all__ = ["RowExchanges"]


class _ExpertRanks(Protocol):
    """Ranks that modules exchange rows of experts through, and that wait for each other inside of modules.

    A rank that has gone elsewhere may wait for what those in a module would send later: weights, or the end of a pass.
    So all meet before that too, and whoever finds others at another place raises.
    """

    def join(self, units: tuple[str, ...]) -> None:
        """Keep the names of a model's units."""

    def meet_before(self, label: Label) -> None:
        """Meet before what `label` says is waited for. Collective.

        Raises:
            RanksApart: where others are elsewhere.
        """


class RowExchanges:
    """The exchanges of rows of one model; most have none.

    Args:
        units: names of all of the model's, which its modules that exchange rows are told.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, units: tuple[str, ...]) -> None:
        self._schedule = schedule
        self._among: Sequence[_ExpertRanks] = [*SHARES_EXPERTS.all_in(model)]
        for ranks in self._among:
            ranks.join(units)

    def before_weights(self, unit: Unit, purpose: Purpose) -> None:
        """Weights of `unit` may have to be waited for. Collective where modules exchange rows."""
        if self._among and self._schedule.meet is not None:
            self.before_end(Label(purpose, unit.index, names=Names(units=unit.names)))

    def before_end(self, label: Label) -> None:
        """A forward or backward ends, at that label. Collective where modules exchange rows."""
        for ranks in self._among:
            ranks.meet_before(label)
