"""The program: the order that all ranks follow from now on, and what this rank has seen that is not in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from terrazzo.engine.schedule.order import Order
from terrazzo.engine.schedule.runnable import Runnable
from terrazzo.engine.schedule.visits import Event, Visit

__all__ = ["UNKNOWN_FORWARD", "Program"]

UNKNOWN_FORWARD = 0
"""Number in place of a forward's, which count from 1, where nobody knows whose backward it is."""
_PENDING = 64
"""Number of forwards of which is remembered what they ran, so that their backward releases weights unit by unit. In the
backward of an older one weights stay until it ends.
"""


class Program:
    """The order that all ranks follow, and what this rank has seen of the model since they compared.

    Args:
        units: all of them, in registration order, which is the program at first.

    Attributes:
        visits: what the last forward of the model ran.
        recomputed: pairs of units that this model recomputes in one region.
        strayed: whether a unit has come elsewhere than in the order, since the last agreement.
    """

    def __init__(self, units: Sequence[Runnable]) -> None:
        self._units, self.order = units, Order.of_registration(units)
        self._indices = {unit.index for unit in units}
        self.visits: list[Visit] = []
        self.recomputed: set[tuple[int, int]] = set()
        self.strayed = False
        self._begun: dict[int, dict[int, int]] = {}
        self._current: dict[int, int] | None = None  # of them, that of the forward that runs

    def begin_forward(self, number: int, differentiated: bool) -> None:
        """The forward of that number begins; numbers go up."""
        self.visits.clear()
        self._current = self._begun.setdefault(number, {}) if differentiated else None
        if len(self._begun) > _PENDING:
            del self._begun[min(self._begun)]

    def has(self, unit: int) -> bool:
        """Whether it is one of the units of this program."""
        return unit in self._indices

    def note(self, unit: int, event: Event) -> None:
        """Note a visit, in the forward that runs."""
        self.visits.append((unit, event))
        if event is Event.ENTER and self._current is not None:
            self._current.setdefault(unit, len(self._current))

    @property
    def last_forward(self) -> int:
        """The number of the last differentiated forward."""
        return max(self._begun, default=UNKNOWN_FORWARD)

    def is_over(self, unit: int, running: int, forward: int) -> bool:
        """Whether the backward of `unit` is known to be over on this rank, where that of `running`, if any, has begun.

        That follows from what this rank has run, in that very forward: it may have called units inside of units that
        the order has after them.

        Args:
            forward: number of the forward whose backward this is, or `UNKNOWN_FORWARD`.
        """
        if (begun := self._begun.get(forward)) is None:
            return False
        return unit not in begun or begun[unit] > begun.get(running, len(begun))

    def join(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Note that each of these pairs of units is recomputed in one region."""
        self.recomputed.update(pairs)

    def stray(self) -> None:
        """Note that a unit has come elsewhere than in the order."""
        self.strayed = True

    def doubt(self) -> None:
        """Note that some rank has strayed: the ranks compare again after the next forward."""
        self.order = replace(self.order, agreed=False)

    def take(self, order: Order) -> None:
        """Run an order on which ranks have agreed elsewhere, of the same units."""
        self.order = replace(order, agreed=True)

    def follow(self, visits: Sequence[Visit] | None) -> None:
        """Run `visits` from now on, on which the ranks have agreed; None: what they ran before."""
        if visits is not None:
            self.order = Order.of_visits(visits, self._units, agreed=True, recomputed=self.recomputed)
        self.strayed = False
