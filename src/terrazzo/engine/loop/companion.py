"""Modules that exchange rows with other ranks in the middle of a pass: they are told where this rank is."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.links.label import Label, Purpose
from terrazzo.engine.plan.family import SHARES_EXPERTS
from terrazzo.engine.schedule.schedule import Schedule

__all__ = ["Companions"]


class Companion(Protocol):
    """What a module that shares experts has been given: ranks that wait for each other inside of modules.

    A rank that has gone elsewhere may wait for what those in a module would send later: weights, or the end of a pass.
    So all meet before that too, and whoever finds others at another place raises.
    """

    def join(self, units: tuple[str, ...]) -> None:
        """Be told the names of a model's units."""

    def pass_by(self, label: Label) -> None:
        """Meet before what `label` says is waited for. Collective.

        Raises:
            RanksApart: where others are elsewhere.
        """


class Companions:
    """Those of one model."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._all: list[Companion] = []

    def find(self, model: nn.Module, units: tuple[str, ...]) -> None:
        self._all = [*SHARES_EXPERTS.all_in(model)]
        for companion in self._all:
            companion.join(units)

    def come_to(self, unit: Unit, purpose: Purpose) -> None:
        """Weights of `unit` may have to be waited for. Collective where there are companions."""
        if self._all and self._schedule.meet is not None:
            self._pass_by(Label(purpose, unit.index, names=unit.names))

    def end(self, purpose: Purpose) -> None:
        """A forward or backward ends. Collective where there are companions."""
        if self._all:
            self._pass_by(self._schedule.end_of(purpose))

    def _pass_by(self, label: Label) -> None:
        for companion in self._all:
            companion.pass_by(label)
