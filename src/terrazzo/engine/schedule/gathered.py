"""Which units' weights a schedule has here, and what becomes of them as forwards and backwards go by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from terrazzo.engine.runtime.calls import do_all
from terrazzo.engine.schedule.runnable import Runnable

__all__ = ["GatheredWeights"]


class GatheredWeights:
    """The schedule alone calls this.

    Attributes:
        here: gathered, and not put down yet, by the program: the same on every rank.
        awaited: units whose backward will be announced.
        until_end: of these, whose weights stay until backward ends.
        lasts: whether this is a step of several micro-batches in flight: between its first forward and its last
            backward weights stay at the plan's `between`, and never go back to `weight`.
    """

    def __init__(self) -> None:
        self.here: set[int] = set()
        self.awaited: set[int] = set()
        self.until_end: set[int] = set()
        self.lasts = False

    def forget(self) -> None:
        """Every unit goes back to the plan's `weight` place, and a step is over."""
        self.lasts = False
        for units in (self.awaited, self.until_end, self.here):
            units.clear()

    def forward_ended(self, unit: Runnable, awaited: bool) -> None:
        """A forward of `unit` has ended; `awaited` if a backward follows."""
        if unit.index not in self.until_end:
            unit.rest_between() if awaited else unit.release()

    def leave_forward(self, left: Iterable[Runnable], training: bool) -> None:
        """The program has left these units in a forward."""
        self.here.difference_update(unit.index for unit in left if not training or unit.regathered)

    def leave_backward(self, unit: Runnable, is_over: bool) -> None:
        """The program has left `unit` in a backward; `is_over` if this rank has, too."""
        if not self.lasts or unit.regathered:
            self.here.discard(unit.index)
        if self.lasts and is_over:
            self.forward_ended(unit, awaited=True)
        elif unit.index not in self.awaited and is_over:
            unit.rest()

    def end_backward(self, units: Sequence[Runnable]) -> None:
        """A backward has ended everywhere."""
        if self.lasts:
            for unit in units:
                self.leave_backward(unit, is_over=True)
        else:
            self.rest(units)

    def rest(self, units: Sequence[Runnable]) -> None:
        """Every unit back to the plan's `weight` place."""
        self.forget()
        do_all(unit.rest for unit in units)
