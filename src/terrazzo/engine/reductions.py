"""Sums of gradients that are under way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from terrazzo.engine.links.label import Label, Purpose
from terrazzo.engine.links.transfer import Transfer
from terrazzo.engine.runnable import Runnable

__all__ = ["Reductions"]


class _Sum(NamedTuple):
    """Of one unit's gradients; `last` if it is then finished."""

    unit: int
    last: bool
    transfer: Transfer


class Reductions:
    """Of several units, oldest first.

    Args:
        denominator: what finished sums are divided by.

    Attributes:
        told: of each unit whose gradients are finished.
    """

    def __init__(self, denominator: Callable[[], float]) -> None:
        self._denominator = denominator
        self.told: Callable[[int], None] = lambda unit: None
        self._sums: list[_Sum] = []

    @property
    def under_way(self) -> bool:
        return bool(self._sums)

    def advance(self) -> None:
        """Move all one collective on; those beside the computation to their end."""
        for each in self._sums:
            each.transfer.advance()
        self._drop_done()

    def make_room(self) -> None:
        """For weights that are gathered next."""
        for each in self._sums:
            each.transfer.make_room()
        self._drop_done()

    def _drop_done(self) -> None:
        for each in self._sums:
            self._tell(each)
        self._sums = [each for each in self._sums if not each.transfer.done]

    def start(self, unit: Runnable, label: Label) -> None:
        """Start summing a unit's gradients."""
        last = label.purpose is Purpose.GRADIENT
        moves = unit.reduce(self._denominator() if last else None)
        self._sums.append(_Sum(unit.index, last, Transfer(moves, label, unit.side)))

    def finish(self) -> None:
        """Wait for all."""
        for each in self._sums:
            each.transfer.finish()
            self._tell(each)
        self._sums.clear()

    def _tell(self, each: _Sum) -> None:
        if each.last and each.transfer.done:
            self.told(each.unit)

    def abandon(self) -> None:
        """Wait for what still comes to its end, and tell nobody."""
        for each in self._sums:
            with contextlib.suppress(RuntimeError, OSError):
                each.transfer.finish()
        self._sums.clear()
