"""One backward along the program.

When the backward of a unit begins, the pass releases the units that have ended, gathers this unit, starts to reduce the
ended ones, starts to gather the next ones, and waits for its own gather. When half of the unit's gradient has come, it
starts the gathers that were postponed. When backward ends, it reduces the rest.

Memory holds three units' worth: the weights and the gradient of the running unit, and either the gradient that is being
reduced or the weights of the next unit. On CPU, where the host waits for reductions, the next gather is therefore
postponed until half of the running unit's gradient has come. On CUDA it follows the reduction on the same stream, and
reuses the memory that the reduction gives back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.plan.moves import GradientFate
from terrazzo.engine.schedule.gathered import GatheredWeights
from terrazzo.engine.schedule.order import position_from
from terrazzo.engine.schedule.program import Program
from terrazzo.engine.schedule.reductions import Reductions
from terrazzo.engine.schedule.runnable import Runnable
from terrazzo.engine.schedule.straying import Straying

__all__ = ["BackwardPass"]


class BackwardPass:
    """A backward, from its begin until its last reduction has ended. `Schedule.begin_backward` makes it.

    One that raised stays with its schedule until gradients are forgotten.

    Args:
        program: what all ranks run.
        number: of this backward, counted from 1.

    Attributes:
        fate: what becomes of its gradients.
        closed: units whose gradients are complete, and may be under reduction.
        late: closed units that have received a further gradient since.
        of_forward: number of the forward that the running unit was in, or `UNKNOWN_FORWARD`; at first of the last one.
    """

    backward_follows = True

    def __init__(
        self,
        program: Program,
        weights: GatheredWeights,
        straying: Straying,
        reductions: Reductions,
        number: int,
        fate: GradientFate,
    ) -> None:
        self.program, self._order, self._weights, self._straying = program, program.order, weights, straying
        self._reductions, self._number, self.fate = reductions, number, fate
        self.closed: set[int] = set()
        self.late: set[int] = set()
        self.of_forward = program.last_forward
        self._running = -1  # the unit that was announced last
        self._cursor = 0  # the position of the program that comes next
        self._postponed: Sequence[int] = ()  # units whose gathers wait for half of a gradient

    @property
    def end_label(self) -> Label:
        """The label of the exchange in which ranks meet when this pass ends."""
        return self._weights.label(Purpose.END_OF_BACKWARD, number=self._number)

    # -- what torch comes to -----------------------------------------------------------------------------------

    def enter(self, unit: Runnable, forward: int) -> None:
        """Backward of `unit` begins; returns once its weights may be read. `forward` as for `Program.is_over`."""
        self._weights.backward_came(unit)
        self._running, self.of_forward = unit.index, forward
        if (position := position_from(self._cursor, self._order.backward, unit.index)) is not None:
            self._go_on_to(position)
        self._await(unit)

    def recompute(self, unit: Runnable) -> None:
        """Forward of `unit` runs again, perhaps long before its own backward.

        Where the program does not know that the unit is recomputed so early, the program is run up to it: gradients of
        the units between come late this time.
        """
        cursor, backward = self._cursor, self._order.backward
        if not self._weights.has(unit):
            self.halfway()
            position = position_from(cursor, backward, unit.index)
            if position is not None and position > self._order.region_ends[cursor]:
                self.program.stray()
                self.program.join((backward[cursor], other) for other in backward[cursor + 1 : position + 1])
                self._go_on_to(position)
            elif position is not None:
                self._gather(backward[cursor : self._order.region_ends[cursor] + 1])
        self._await(unit)

    def expect(self, unit: Runnable) -> None:
        """Forward of `unit` has run again, and its backward will be announced."""
        self._weights.expect_backward(unit)

    def _await(self, unit: Runnable) -> None:
        if not unit.weights.at_hand:
            self._straying.ask_for(unit, self)
        unit.weights.wait()

    def gradient_came(self, unit: Runnable) -> None:
        """A parameter of `unit` has received its gradient."""
        if self._postponed and self._order.backward[self._cursor - 1] == unit.index and unit.half_filled:
            self.halfway()
        if unit.index in self.closed:
            self.late.add(unit.index)

    def end(self) -> None:
        """Autograd is done: run the program to its end, and start the last sums, for which `Schedule` waits."""
        self.run_to_end()
        self._straying.serve(self)
        self._weights.end_backward()
        self.close(self._weights.units[index] for index in self._order.closes_last)

    # -- along the program -------------------------------------------------------------------------------------

    def run_to_end(self) -> None:
        """Take part in what is left of the program."""
        last = len(self._order.backward) - 1
        if self._cursor <= last:
            self._go_on_to(last)
            self._weights.units[self._order.backward[last]].weights.wait()

    def _go_on_to(self, position: int) -> None:
        """Run the program up to `position`: the same calls in the same order on every rank."""
        order, units = self._order, self._weights.units
        for step in range(self._cursor, position + 1):
            self.halfway()  # where this rank's data has not led there
            ended = [units[index] for index in order.closes[step]]
            for unit in ended:
                is_over = self.program.is_over(unit.index, self._running, self.of_forward)
                self._weights.leave_backward(unit, is_over)
            running = units[order.backward[step]]
            self._gather(order.backward[step : order.region_ends[step] + 1])
            ahead = order.backward[step + 1 : step + 1 + self._weights.prefetch]
            ahead = tuple(index for index in ahead if units[index].weights.regathered)
            go_on = self._go_on_by_host if running.comm_streams is None else self._go_on_on_streams
            go_on(running, ended, ahead)
            if step < position:
                running.weights.wait()
        self._cursor = position + 1

    def _go_on_on_streams(self, running: Runnable, ended: Iterable[Runnable], ahead: Sequence[int]) -> None:
        """Reductions run on a stream of their own: the next gathers follow right after them."""
        running.weights.wait()  # its gradient's memory comes after what has had a unit's time, and no more
        self._reductions.advance()
        if self.fate is not GradientFate.DROPPED:  # which are not reduced: their memory is the computation's
            running.expect_gradients(self.fate)
        self.close(ended)
        self._postponed = ahead
        self.halfway()

    def _go_on_by_host(self, running: Runnable, ended: Iterable[Runnable], ahead: Sequence[int]) -> None:
        """The host waits for reductions: the next gathers wait for half of the running unit's gradient."""
        self.close(ended)
        self._postponed = ahead
        if not (self._reductions.under_way and running.fills_gradually):
            self._gather_postponed()

    def halfway(self) -> None:
        """Half of the running unit's gradient has come, or the program moves on: make room, and gather what is next."""
        if self._postponed:
            self._reductions.make_room()
        self._gather_postponed()

    def _gather_postponed(self) -> None:
        postponed, self._postponed = self._postponed, ()
        self._gather(postponed)

    def _gather(self, indices: Sequence[int]) -> None:
        self._weights.gather(indices, Purpose.BACKWARD, self._number)

    # -- gradients ---------------------------------------------------------------------------------------------

    def close(self, units: Iterable[Runnable]) -> None:
        """The gradients of units are complete: start to sum them over ranks, if this pass reduces."""
        for unit in units:
            self.closed.add(unit.index)
            if unit.has_gradients and self.fate is GradientFate.DROPPED:
                self._reductions.report(unit.index, self.fate)
            elif unit.has_gradients and self.fate is not GradientFate.LOCAL:
                self.start_reducing(unit)

    def start_reducing(self, unit: Runnable) -> None:
        """Start summing a unit's gradients over ranks."""
        purpose = Purpose.GRADIENT if self.fate is GradientFate.FINISHED else Purpose.PARTIAL
        self._reductions.start(unit, self._weights.label(purpose, unit.index, self._number), self.fate)

    def abandon(self) -> None:
        """The backward raised, on every rank: end what is under way."""
        self._reductions.abandon()
        with contextlib.suppress(RuntimeError, OSError):
            self._gather_postponed()  # a rank that came a little further has done so
