"""One forward of the model along the program.

When the forward of a unit begins, the pass gathers the unit, starts to gather the next ones, and waits for its own
gather. When it ends, the unit's weights go to the plan's `between`.
"""

from __future__ import annotations

from collections import Counter

from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.schedule.gathered import BackwardToCome, GatheredWeights
from terrazzo.engine.schedule.order import position_from
from terrazzo.engine.schedule.program import Program
from terrazzo.engine.schedule.runnable import Runnable
from terrazzo.engine.schedule.straying import Straying
from terrazzo.engine.schedule.visits import Event

__all__ = ["ForwardPass"]


class ForwardPass:
    """The model's own forward, from its begin until it has ended, or has raised. `Schedule.begin_forward` makes it.

    All ranks begin and end it; which units they enter in between, and in which order, may differ.

    Args:
        program: what all ranks run.
        number: of this forward, counted from 1.
        training: whether it is differentiated, whatever parts of it are not.
    """

    def __init__(
        self, program: Program, weights: GatheredWeights, straying: Straying, number: int, training: bool
    ) -> None:
        self.program, self._order, self._weights, self._straying = program, program.order, weights, straying
        self._number, self.backward_follows = number, training
        self._running = Counter[int]()  # calls of each unit that have not ended
        self._cursor = 0  # the position of the program that comes next
        program.begin_forward(number, training)

    @property
    def end_label(self) -> Label:
        """The label of the exchange in which ranks meet when this pass ends."""
        return self._weights.label(Purpose.END_OF_FORWARD, number=self._number)

    def enter(self, unit: Runnable) -> None:
        """Forward of `unit` begins; returns once its weights may be read."""
        self.program.note(unit.index, Event.ENTER)
        if (position := position_from(self._cursor, self._order.forward, unit.index)) is not None:
            self._pass_by(position)
            self._come_to(position)
        if not unit.weights.at_hand:
            self._straying.ask_for(unit, self)
        self._running[unit.index] += 1
        unit.weights.wait()

    def leave(self, unit: Runnable, to_come: BackwardToCome = BackwardToCome.ANNOUNCED) -> None:
        """Forward of `unit` has ended."""
        comes = to_come in (BackwardToCome.ANNOUNCED, BackwardToCome.RECOMPUTED)
        self._weights.expect_backward(unit, to_come)
        self._running[unit.index] -= 1
        self.program.note(unit.index, Event.LEAVE if comes else Event.LEAVE_FOR_GOOD)
        self._weights.reshard(unit, self.backward_follows)  # which must not depend on this rank's data

    def end(self) -> None:
        """The forward has ended here: take part in what other ranks may still run."""
        self._running.clear()
        self.run_to_end()
        self._straying.serve(self)

    def run_to_end(self) -> None:
        """Take part in what is left of the program."""
        last = len(self._order.forward)
        if self._cursor <= last:
            self._pass_by(last)
            self._leave(last)
            self._cursor = last + 1

    def _pass_by(self, position: int) -> None:
        """Take part in the gathers of units that only other ranks run, up to `position`."""
        for skipped in range(self._cursor, position):
            self._come_to(skipped)
            unit = self._weights.units[self._order.forward[skipped]]
            unit.weights.wait()
            if not self._running[unit.index]:
                self._weights.reshard(unit, self.backward_follows)

    def _come_to(self, position: int) -> None:
        """Start gathering the unit at `position` of the program and those to prefetch."""
        self._leave(position)
        coming = self._order.forward[position : position + 1 + self._weights.prefetch]
        self._weights.gather(coming, Purpose.FORWARD if self.backward_follows else Purpose.EVALUATION, self._number)
        self._cursor = position + 1

    def _leave(self, position: int) -> None:
        self._weights.leave_forward(self._order.leaves[position], self.backward_follows)
