"""Sums of gradients over ranks that are under way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.labels.label import Label
from terrazzo.engine.plan.moves import Divisor, GradientFate
from terrazzo.engine.runtime.calls import do_nothing
from terrazzo.engine.schedule.runnable import Runnable

__all__ = ["Reductions"]


class _Sum(NamedTuple):
    """The sum of one unit's gradients, and what becomes of it."""

    unit: int
    fate: GradientFate
    transfer: Transfer[object]


class Reductions:
    """The sums of several units' gradients, oldest first. Only the schedule calls this.

    Each sum is a chain of collectives. Chains start and move on at points of the program, so all ranks issue the same
    collectives in the same order. No sum outlives its backward, which `wait` or `abandon` ends.

    Args:
        divisor: returns what finished sums are divided by; asked for each sum as it starts.
    """

    def __init__(self, divisor: Callable[[], Divisor]) -> None:
        self._divisor = divisor
        self._calls: dict[GradientFate, Callable[[int], None]] = {}
        self._sums: list[_Sum] = []

    def call_on(self, fate: GradientFate, call: Callable[[int], None]) -> None:
        """Call `call` with the index of each unit whose gradients are `FINISHED`, or complete to be `DROPPED`.

        A gradient that comes late is summed by itself, and `call` is called for its unit once more in the same step.
        """
        self._calls[fate] = call

    def report(self, unit: int, fate: GradientFate) -> None:
        """Tell what has become of a unit's gradients."""
        self._calls.get(fate, do_nothing)(unit)

    @property
    def under_way(self) -> bool:
        """Whether any sum holds memory that it will give back."""
        return any(each.transfer.holds_room for each in self._sums)

    def advance(self) -> None:
        """Move each sum one collective on; one that runs on streams, to the end of its first stream's part."""
        for each in self._sums:
            each.transfer.advance()
        self._drop_done()

    def make_room(self) -> None:
        """Give back memory of sums for the next gather; waits for them where the host does the work."""
        for each in self._sums:
            each.transfer.make_room()
        self._drop_done()

    def _drop_done(self) -> None:
        for each in self._sums:
            self._report_done(each)
        self._sums = [each for each in self._sums if not each.transfer.done]

    def start(self, unit: Runnable, label: Label, fate: GradientFate) -> None:
        """Start summing a unit's gradients.

        Where the host waits for that, earlier sums move one collective on.
        """
        if unit.comm_streams is None:
            self.advance()
        moves = unit.reduce(self._divisor(), fate)
        self._sums.append(_Sum(unit.index, fate, Transfer(moves, label, unit.comm_streams)))

    def wait(self) -> None:
        """Return once all sums have ended, oldest first."""
        for each in self._sums:
            each.transfer.finish()
            self._report_done(each)
        self._sums.clear()

    def _report_done(self, each: _Sum) -> None:
        if each.transfer.done:
            self.report(each.unit, each.fate)

    def abandon(self) -> None:
        """Wait for what still ends, and call nobody: a backward raised."""
        for each in self._sums:
            with contextlib.suppress(RuntimeError, OSError):
                each.transfer.finish()
        self._sums.clear()
