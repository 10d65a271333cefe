"""When things happen: gathers, releases and reductions, along an order that all ranks share.

Forward of a unit begins: gather it, start gathering the next ones, wait. It ends: weights go to the plan's `between`.
Backward of a unit begins: release the units that have ended, gather this one, start reducing the ended ones, start
gathering the next ones, wait. Half of its gradient is there: gather what was postponed. Backward ends: reduce the rest.

In backward three units' worth of memory is in use: the weights and the gradient of the running unit, and either the
gradient that is being reduced or the weights that come next. Where the host waits for a reduction, the next gather is
therefore postponed until half of the running unit's gradient is there. Beside the computation it comes right behind the
reduction, on the same stream, and has the memory that this gives back.

Whether a unit is gathered at a position of the program follows from the program alone, never from what is in this
rank's memory: only so do all ranks issue the same. A rank that needs a unit which the program does not have there
strays: it takes part in the rest of the program, and then asks; the others hear it at the end of their own pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from terrazzo.engine.links.label import Label, Purpose
from terrazzo.engine.plan.spec import Pass
from terrazzo.engine.runtime.calls import do_all
from terrazzo.engine.schedule.gathered import GatheredWeights
from terrazzo.engine.schedule.order import Event, Order, Program, position_from
from terrazzo.engine.schedule.reductions import Divisor, Reductions
from terrazzo.engine.schedule.runnable import Runnable

__all__ = ["Meet", "Schedule"]

Meet = Callable[[Label, int], int]


class Schedule:
    """Runs the units of one model, or units on paper.

    Hooks call `begin_`, `enter_`, `leave_` and `end_` as torch comes to them, and the engine the rest. All ranks begin
    and end the same passes; which units they enter in between, and in which order, may differ.

    Args:
        units: in registration order, root first.
        prefetch: how many units ahead of the running one are gathered.
        meet: the highest of the numbers that ranks bring to the end of a pass; None where none needs another's weights.
        denominator: what finished gradient sums are divided by.

    Attributes:
        program: what all ranks run.
        this_pass: what becomes of this micro-batch's gradients.
        in_forward: whether the model's own forward runs; False in that of a unit which the user calls alone.
        in_backward: whether a backward has begun and not come to `finish`; stays True where one raised.
        ends_model: whether what the forward returns is the model's own output, and not what its next stage is given.
        closed: units whose gradients are being reduced, or are complete, in this backward.
    """

    def __init__(
        self, units: Sequence[Runnable], prefetch: int, meet: Meet | None = None, denominator: Divisor = lambda: 1.0
    ) -> None:
        self.units, self.program, self.prefetch, self.meet = units, Program(units), prefetch, meet
        self.this_pass, self.closed = Pass.FINISHES, set[int]()
        self.in_forward = self.in_backward = self._training = False
        self.ends_model = True
        self._names = tuple(unit.name for unit in units)
        self._gathered, self._running = GatheredWeights(), Counter[int]()
        self._reductions = Reductions(denominator)
        self._postponed: Sequence[int] = ()
        self._forward_cursor = self._backward_cursor = self._forwards = self._backwards = 0
        self._announced = -1  # the unit whose backward runs
        self._of_forward: int | None = None  # in which it ran

    @property
    def order(self) -> Order:
        return self.program.order

    @property
    def programs(self) -> Sequence[Program]:
        """All of them, where parts of the model run by themselves."""
        return [self.program]

    # -- what holds from now on --------------------------------------------------------------------------------

    def set_pass(self, this_pass: Pass) -> None:
        """Say what becomes of the gradients of backward passes from now on."""
        self.this_pass = this_pass

    def gather_ahead(self, count: int) -> None:
        """At least so many units are gathered ahead of the running one."""
        self.prefetch = max(self.prefetch, count)

    def on_finished(self, call: Callable[[int], None]) -> None:
        """Have `call` called with the index of each unit whose gradients are finished."""
        self._reductions.on_finished = call

    # -- forward -----------------------------------------------------------------------------------------------

    def begin_forward(self, training: bool) -> None:
        """The model's own forward begins; `training` if it is differentiated, whatever parts of it are not."""
        self.in_forward, self._training, self._forward_cursor = True, training, 0
        self._forwards += 1
        self._running.clear()
        self.program.begin_forward(self._forwards, training)

    def enter_forward(self, unit: Runnable) -> None:
        """Forward of `unit` begins; returns once its weights may be read."""
        if not self.in_forward:  # every rank calls the unit itself
            if unit.index not in self._gathered.here or not unit.at_hand:
                unit.gather(self._label(Purpose.OUTSIDE, unit.index), from_rest=True)
            unit.wait()
            return
        self.program.note(unit.index, Event.ENTER)
        if (position := position_from(self._forward_cursor, self.order.forward, unit.index)) is not None:
            self._pass_forward(position)
            self._forward_at(position)
        if not unit.at_hand:
            self._ask_for(unit, Purpose.END_OF_FORWARD)
        self._running[unit.index] += 1
        unit.wait()

    def leave_forward(self, unit: Runnable, training: bool, differentiable: bool = True) -> None:
        """Forward of `unit` has ended; `differentiable` if a backward of it will be announced."""
        if awaited := training and differentiable:
            self._gathered.awaited.add(unit.index)
        if self.in_forward:
            self._running[unit.index] -= 1
            self.program.note(unit.index, Event.LEAVE if differentiable else Event.LEAVE_FOR_GOOD)
            awaited = self._training  # what is put down must not depend on this rank's data
        self._gathered.forward_ended(unit, awaited)

    def hold_until_backward_ends(self, unit: Runnable) -> None:
        """Forward of `unit` has ended, and nothing will tell when its backward begins."""
        if self.in_forward:
            self._running[unit.index] -= 1
            self.program.note(unit.index, Event.LEAVE_FOR_GOOD)
        self._gathered.awaited.add(unit.index)
        self._gathered.until_end.add(unit.index)

    def end_forward(self) -> None:
        """The model's own forward has ended: take part in what other ranks may still run."""
        self._running.clear()
        self._finish_forward()
        self._serve(Purpose.END_OF_FORWARD)
        self.in_forward = False
        ended = [unit for unit in self.units if not self._training or unit.index not in self._gathered.awaited]
        do_all(functools.partial(self._gathered.forward_ended, unit, self._training) for unit in ended)

    def abandon_forward(self) -> None:
        """The model's own forward raised."""
        self.in_forward = False
        self._gathered.here.clear()
        for unit in (unit for unit in self.units if unit.index not in self._gathered.until_end):
            with contextlib.suppress(RuntimeError, OSError):  # a gather that failed does so again
                unit.release()

    def _pass_forward(self, position: int) -> None:
        """Take part in the gathers of units that only other ranks run, up to `position`."""
        for skipped in range(self._forward_cursor, position):
            self._forward_at(skipped)
            unit = self.units[self.order.forward[skipped]]
            unit.wait()
            if not self._running[unit.index]:
                self._gathered.forward_ended(unit, self._training)

    def _forward_at(self, position: int) -> None:
        """Come to `position` of the program: start gathering its unit and those to prefetch."""
        purpose = Purpose.FORWARD if self._training else Purpose.EVALUATION
        self._leave(position)
        for index in self.order.forward[position : position + 1 + self.prefetch]:
            self._take_part(index, purpose, self._forwards)
        self._forward_cursor = position + 1

    def _leave(self, position: int) -> None:
        self._gathered.leave_forward((self.units[index] for index in self.order.left[position]), self._training)

    def _finish_forward(self) -> None:
        last = len(self.order.forward)
        if self._forward_cursor <= last:
            self._pass_forward(last)
            self._leave(last)
            self._forward_cursor = last + 1

    def _take_part(self, index: int, purpose: Purpose, number: int) -> None:
        """Start gathering a unit, unless the program has it here already."""
        if index in self._gathered.here:
            self.units[index].advance()
        else:
            self._gathered.here.add(index)
            self.units[index].gather(self._label(purpose, index, number))

    def _label(self, purpose: Purpose, index: int = 0, number: int = 0) -> Label:
        return Label(purpose, index, number, self._names)

    # -- units that come elsewhere than in the program ---------------------------------------------------------

    def _ask_for(self, unit: Runnable, pass_end: Purpose) -> None:
        """Gather a unit that the program does not have here, together with all ranks, when they have ended theirs."""
        self.program.stray()
        if self.meet is not None:
            self._finish_forward() if pass_end is Purpose.END_OF_FORWARD else self._finish_backward()
            while (served := self._meet(pass_end, unit.index + 1)) != unit.index + 1:
                self._gather_for_others(self.units[served - 1])
        unit.gather(self._label(Purpose.STRAY, unit.index), from_rest=True)

    def _serve(self, pass_end: Purpose) -> None:
        """Take part, at the end of a pass, in the gathers of what other ranks ask for, until no one does."""
        while self.meet is not None and (served := self._meet(pass_end, 0)):
            self.program.stray()
            self._gather_for_others(self.units[served - 1])

    def _meet(self, pass_end: Purpose, wanted: int) -> int:
        assert self.meet is not None
        return self.meet(self.end_of(pass_end), wanted)

    def end_of(self, pass_end: Purpose) -> Label:
        """The label at which ranks meet at the end of this forward or backward."""
        number = self._forwards if pass_end is Purpose.END_OF_FORWARD else self._backwards
        return self._label(pass_end, number=number)

    def _gather_for_others(self, unit: Runnable) -> None:
        was_at_hand = unit.at_hand
        unit.gather(self._label(Purpose.STRAY, unit.index), from_rest=True)
        unit.wait()
        if not was_at_hand:
            self._gathered.forward_ended(unit, self._training or self.in_backward)

    def gather_early(self, unit: Runnable) -> None:
        """Every rank gathers a unit before the program comes to it."""
        self._take_part(unit.index, Purpose.OUTSIDE, 0)

    def put_back(self, unit: Runnable) -> None:
        """The reverse of `gather_early`."""
        self._gathered.here.discard(unit.index)
        unit.rest()

    # -- backward ----------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        self.in_backward, self._backward_cursor, self._postponed = True, 0, ()
        self._announced, self._of_forward = -1, None
        if self.meet is not None or self.this_pass is not Pass.ADDS:
            self._backwards += 1
        self.closed.clear()

    @property
    def forward_number(self) -> int | None:
        """Of the forward that runs or ran last, counted from 1; inside backward of the one that this is of."""
        return self._of_forward if self.in_backward else self._forwards

    def enter_backward(self, unit: Runnable, forward: int | None = None) -> None:
        """Backward of `unit` begins; returns once its weights may be read. `forward` as for `Program.is_over`."""
        self._gathered.awaited.discard(unit.index)
        self._announced, self._of_forward = unit.index, forward
        if (position := position_from(self._backward_cursor, self.order.backward, unit.index)) is not None:
            self._backward_to(position)
        self._have_in_backward(unit)

    def recompute(self, unit: Runnable) -> None:
        """Forward of `unit` runs again inside of backward, perhaps long before its own backward.

        The program is run up to what it does not know to be recomputed so early: gradients between come late this time.
        """
        cursor, backward = self._backward_cursor, self.order.backward
        if unit.index not in self._gathered.here:
            self.halfway()
            position = position_from(cursor, backward, unit.index)
            if position is not None and position > self.order.region_ends[cursor]:
                self.program.stray()
                self.program.join((backward[cursor], other) for other in backward[cursor + 1 : position + 1])
                self._backward_to(position)
            elif position is not None:
                self._gather_again(backward[cursor : self.order.region_ends[cursor] + 1])
        self._have_in_backward(unit)

    def expect_backward(self, unit: Runnable) -> None:
        """Forward of `unit` has run again, and its backward will be announced."""
        self._gathered.awaited.add(unit.index)

    def _have_in_backward(self, unit: Runnable) -> None:
        if not unit.at_hand:
            self._ask_for(unit, Purpose.END_OF_BACKWARD)
        unit.wait()

    def end_backward(self) -> None:
        """Autograd is done: run the program to its end. `finish` must follow."""
        self._finish_backward()
        self._serve(Purpose.END_OF_BACKWARD)
        self._gathered.end_backward(self.units)
        self._close(self.units[index] for index in self.order.remaining)

    def finish(self) -> None:
        """Wait for every reduction under way."""
        self._reductions.finish()
        self.in_backward = False

    def forget_gradients(self, set_to_none: bool = True) -> None:
        """Forget every gradient, or set finished ones to zero; those on their way from a backward that raised, too."""
        if self.in_backward or self._gathered.lasts:
            self._abandon_backward()
        for unit in self.units:
            unit.zero_grad(set_to_none)

    def _abandon_backward(self) -> None:
        """A backward raised, here and on every other rank: let go of what it left behind."""
        self._reductions.abandon()
        with contextlib.suppress(RuntimeError, OSError):
            self._fetch_postponed()  # a rank that came a little further has done so
        self.in_backward = False
        self._gathered.forget()
        for unit in self.units:
            with contextlib.suppress(RuntimeError, OSError):
                unit.rest()

    def _finish_backward(self) -> None:
        last = len(self.order.backward) - 1
        if self._backward_cursor <= last:
            self._backward_to(last)
            self.units[self.order.backward[last]].wait()

    def _backward_to(self, position: int) -> None:
        """Run the program up to `position`: the same calls in the same order on every rank."""
        order = self.order
        for step in range(self._backward_cursor, position + 1):
            self.halfway()  # where this rank's data has not led there
            ended = [self.units[index] for index in order.closes[step]]
            for unit in ended:
                is_over = self.program.is_over(unit.index, self._announced, self._of_forward)
                self._gathered.leave_backward(unit, is_over)
            running = self.units[order.backward[step]]
            self._gather_again(order.backward[step : order.region_ends[step] + 1])
            ahead = [i for i in order.backward[step + 1 : step + 1 + self.prefetch] if self.units[i].regathered]
            go_on = self._go_on_in_step if running.side is None else self._go_on_beside
            go_on(running, ended, ahead)
            if step < position:
                running.wait()
        self._backward_cursor = position + 1

    def _go_on_beside(self, running: Runnable, ended: Iterable[Runnable], ahead: Sequence[int]) -> None:
        """Reductions run beside the computation: gathers of what comes next follow right behind them."""
        running.wait()  # its gradient's memory comes behind what has had a unit's time, and no more
        self._reductions.advance()
        running.expect_gradients(self.this_pass)
        self._close(ended)
        self._postponed = ahead
        self.halfway()

    def _go_on_in_step(self, running: Runnable, ended: Iterable[Runnable], ahead: Sequence[int]) -> None:
        """The host waits for reductions: gathers of what comes next wait for half of the running unit's gradient."""
        self._close(ended)
        self._postponed = ahead
        if not (self._reductions.under_way and running.fills_gradually):
            self._fetch_postponed()

    def awaits_half_of(self, unit: Runnable) -> bool:
        """Whether a gather waits for half of the gradient of `unit`."""
        return bool(self._postponed) and self.order.backward[self._backward_cursor - 1] == unit.index

    def halfway(self) -> None:
        """Half of the running unit's gradient is there, or the program goes on: make room, and gather what is next."""
        if self._postponed:
            self._reductions.make_room()
        self._fetch_postponed()

    def _fetch_postponed(self) -> None:
        postponed, self._postponed = self._postponed, ()
        self._gather_again(postponed)

    def _gather_again(self, units: Sequence[int]) -> None:
        for index in units:
            self._take_part(index, Purpose.BACKWARD, self._backwards)

    def _close(self, units: Iterable[Runnable]) -> None:
        """The gradients of units are complete: start summing them over ranks, unless this micro-batch only adds."""
        for unit in units:
            self.closed.add(unit.index)
            if unit.has_gradients and self.this_pass is not Pass.ADDS:
                self.start_reducing(unit)

    def start_reducing(self, unit: Runnable) -> None:
        """Start summing a unit's gradients over ranks."""
        purpose = Purpose.GRADIENT if self.this_pass is Pass.FINISHES else Purpose.PARTIAL
        self._reductions.start(unit, self._label(purpose, unit.index, self._backwards))

    @property
    def awaits_backward(self) -> bool:
        """Whether the backward of an earlier forward has not come, or raised."""
        return bool(self._gathered.awaited) and not self._gathered.lasts

    # -- outside a step ----------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Every unit back to the plan's `weight` place."""
        self._gathered.rest(self.units)

    def gather_all(self) -> None:
        """Full weights of every unit, until `rest`."""
        for unit in self.units:
            unit.gather(self._label(Purpose.OUTSIDE, unit.index), from_rest=True)
        for unit in self.units:
            unit.wait()
