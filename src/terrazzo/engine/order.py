"""The order in which units are gathered and reduced: agreed by all ranks, followed by each.

Collectives must be issued in the same order on every rank, whatever a rank's data makes it skip. So their order is a
program computed from two lists that all ranks share, and local execution only moves a cursor along it: a rank that
skips a unit still takes part in the unit's collectives when its cursor passes by.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.engine.unit import Unit

__all__ = ["Order", "Recorder", "contains"]


@dataclass(frozen=True)
class Order:
    """The program of a step.

    Attributes:
        forward: unit indices as their forwards begin, repeats included.
        backward: unit indices as their backwards begin.
        closes: for each position of `backward`, the units whose backward has ended when that position begins. Autograd
            runs ready nodes latest-created first, so once the backward of one unit begins, that of every unit whose
            forward began later, and whose own visits are over, has ended.
        remaining: the units that end only with the backward pass itself.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    closes: tuple[tuple[int, ...], ...]
    remaining: tuple[int, ...]

    @classmethod
    def of(cls, forward: Sequence[int], backward: Sequence[int]) -> Order:
        first = {unit: position for position, unit in reversed(list(enumerate(forward)))}
        last_visit = {unit: position for position, unit in enumerate(backward)}
        opened = list(dict.fromkeys(backward))
        closes: list[tuple[int, ...]] = []
        closed: set[int] = set()
        for position, unit in enumerate(backward):
            ended = [u for u in opened if u not in closed and last_visit[u] < position and first[u] > first[unit]]
            closed.update(ended)
            closes.append(tuple(ended))
        return cls(tuple(forward), tuple(backward), tuple(closes), tuple(u for u in opened if u not in closed))

    @classmethod
    def of_registration(cls, units: Sequence[Unit]) -> Order:
        """The order to expect before anything has run: that of registration, a unit around its inner units."""
        forward = [unit.index for unit in units]
        ends: list[int] = []
        open_units: list[Unit] = []
        for unit in units:
            while open_units and not contains(open_units[-1], unit):
                ends.append(open_units.pop().index)
            open_units.append(unit)
        ends += [unit.index for unit in reversed(open_units)]
        return cls.of(forward, ends[::-1])


def contains(outer: Unit, inner: Unit) -> bool:
    """Whether the module of `inner` lies inside that of `outer`."""
    return outer.is_root or inner.name.startswith(outer.name + ".")


class Recorder:
    """What one step really visited, to be adopted as the next order if every rank saw the same."""

    def __init__(self) -> None:
        self.forward: list[int] = []
        self.backward: list[int] = []

    def digest(self) -> int:
        """A number that two ranks share only if they visited the same units in the same order."""
        text = f"{self.forward}{self.backward}"
        return zlib.crc32(text.encode())

    def order(self, expected: Order, trainable: set[int]) -> Order | None:
        """The recorded order, or None if it is the expected one or lacks a unit that another step may need."""
        if (tuple(self.forward), tuple(self.backward)) == (expected.forward, expected.backward):
            return None
        complete = set(self.forward) >= set(expected.forward) and set(self.backward) >= trainable
        if not complete or not set(self.backward) <= set(self.forward):
            return None
        return Order.of(self.forward, self.backward)
