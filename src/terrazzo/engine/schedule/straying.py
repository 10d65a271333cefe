"""Gathers outside of the program: a rank needs a unit where the program does not have it, so it strays.

Such a rank first takes part in the rest of the program, and then asks for the unit. The other ranks hear this when they
meet at the end of their own pass, and gather the unit together with it. All ranks meet again until nobody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.schedule.gathered import GatheredWeights
from terrazzo.engine.schedule.program import Program
from terrazzo.engine.schedule.runnable import Runnable

__all__ = ["Meet", "Straying"]

Meet = Callable[[Label, int], int]


class _Pass(Protocol):
    """A forward or a backward, as far as straying in it goes."""

    @property
    def program(self) -> Program:
        """Program that all ranks run."""

    @property
    def end_label(self) -> Label:
        """Label of the exchange in which ranks meet when it ends."""

    @property
    def backward_follows(self) -> bool:
        """Whether weights that it puts down will be read again in a backward."""

    def run_to_end(self) -> None:
        """Take part in what is left of the program."""


class Straying:
    """Gathers that the program does not have.

    Args:
        meet: the highest of the numbers that ranks bring to the end of a pass; None where none needs another's weights.
    """

    def __init__(self, weights: GatheredWeights, meet: Meet | None) -> None:
        self._weights, self._meet = weights, meet

    def ask_for(self, unit: Runnable, during: _Pass) -> None:
        """Gather a unit that the program does not have here, together with all ranks, when they have ended theirs."""
        during.program.stray()
        if self._meet is not None:
            during.run_to_end()
            while (number := self._meet(during.end_label, unit.index + 1)) != unit.index + 1:
                self._gather_for_others(number, during)
        self._gather(unit)

    def serve(self, during: _Pass) -> None:
        """Take part, at the end of a pass, in the gathers of what other ranks ask for, until no one does."""
        while self._meet is not None and (number := self._meet(during.end_label, 0)):
            during.program.stray()
            self._gather_for_others(number, during)

    def _gather_for_others(self, number: int, during: _Pass) -> None:
        unit = self._weights.units[number - 1]
        was_at_hand = unit.weights.at_hand
        self._gather(unit)
        unit.weights.wait()
        if not was_at_hand:
            self._weights.reshard(unit, during.backward_follows)

    def _gather(self, unit: Runnable) -> None:
        unit.weights.gather(self._weights.label(Purpose.STRAY, unit.index), from_rest=True)
