"""When things happen: gathers, releases and reductions, along an order that all ranks share.

Five events drive everything. Forward of a unit begins: gather it, start gathering the next ones, wait. Forward ends:
weights go to the plan's `between`. Backward of a unit begins: release the units that have ended, gather this one, start
reducing the ended ones, start gathering the next ones, wait. Backward ends: reduce the rest.

In backward three units' worth of memory is in use: the weights and the gradient of the running unit, and either the
gradient that is being reduced or the weights that come next. So while a gradient is being reduced, the next gather is
held back until half of the running unit's gradient is there.

`hooks` connects these events to a model; `bill` runs the same code on units that only count bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from terrazzo.engine.order import ENTER, LEAVE, LEAVE_FOR_GOOD, Order, Visit
from terrazzo.engine.transfer import Moves, Transfer

__all__ = ["Runnable", "Schedule"]


class Runnable(Protocol):
    """What the schedule asks of a unit; see `Unit`."""

    @property
    def index(self) -> int: ...
    @property
    def has_gradients(self) -> bool: ...
    @property
    def regathered(self) -> bool: ...
    @property
    def fills_gradually(self) -> bool: ...
    def fetch(self) -> None: ...
    def wait(self) -> None: ...
    def rest_between(self) -> None: ...
    def release(self) -> None: ...
    def rest(self) -> None: ...
    def reduce(self, denominator: float | None) -> Moves: ...


class Schedule:
    """Runs the units of one model.

    Args:
        units: in registration order, root first.
        order: the program to start with.
        prefetch: how many units ahead of the running one are gathered.

    Attributes:
        denominator: divides finished gradient sums.
        reduced: told of each unit whose gradients are finished.
        visits: what the last forward of the model ran.
        strayed: whether a unit has come elsewhere than in the order, since the last agreement.
        closed: units whose gradients are being reduced, or are complete, in this backward.
        accumulating: whether this micro-batch is not the step's last.
        reduce_each: whether such a micro-batch's gradients are reduced, to the plan's `grad` place, or only added.
    """

    def __init__(self, units: Sequence[Runnable], order: Order, prefetch: int) -> None:
        self.units, self.order, self.prefetch = units, order, prefetch
        self.denominator: Callable[[], float] = lambda: 1.0
        self.reduced: Callable[[int], None] = lambda unit: None
        self.accumulating = False
        self.reduce_each = True
        self.visits: list[Visit] = []
        self.strayed = False
        self.closed: set[int] = set()
        self.in_forward = self.in_backward = False
        self._awaited: set[int] = set()
        self._reducing: list[tuple[int, Transfer]] = []
        self._held_back: Sequence[int] = ()
        self._forward_cursor = self._backward_cursor = 0

    # -- forward -----------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The model's own forward begins."""
        if self.in_backward:
            self.abandon_backward()  # an earlier backward raised: its end never came
        self.in_forward, self._forward_cursor = True, 0
        self.visits.clear()

    def enter_forward(self, unit: Runnable, training: bool) -> None:
        """Forward of `unit` begins; returns once its weights may be read."""
        if self.in_forward:
            self.visits.append((unit.index, ENTER))
            self._forward_to(unit, training)
        unit.wait()

    def leave_forward(self, unit: Runnable, training: bool, differentiable: bool = True) -> None:
        """Forward of `unit` has ended; `differentiable` if a backward of it will be announced."""
        if self.in_forward:
            self.visits.append((unit.index, LEAVE if differentiable else LEAVE_FOR_GOOD))
        if training and differentiable:
            self._awaited.add(unit.index)
        self._put_down(unit, training)

    def hold_until_backward_ends(self, unit: Runnable) -> None:
        """Forward of `unit` has ended, and nothing will tell when its backward begins."""
        if self.in_forward:
            self.visits.append((unit.index, LEAVE_FOR_GOOD))
        self._awaited.add(unit.index)

    def end_forward(self, training: bool) -> None:
        """The model's own forward has ended: take part in what other ranks may still run."""
        self.in_forward = False
        order = self.order.forward
        for skipped in range(self._forward_cursor, len(order)):
            self._fetch(skipped)
            self.units[order[skipped]].wait()
        for unit in self.units:
            if not training or unit.index not in self._awaited:
                self._put_down(unit, training)

    def abandon_forward(self) -> None:
        """The model's own forward raised."""
        self.in_forward = False
        for unit in self.units:
            with contextlib.suppress(RuntimeError, OSError):  # a gather that failed does so again
                unit.release()

    def _put_down(self, unit: Runnable, training: bool) -> None:
        if training:
            unit.rest_between()
        else:
            unit.release()

    def _forward_to(self, unit: Runnable, training: bool) -> None:
        order = self.order.forward
        position = _find(order, unit.index, self._forward_cursor)
        if position is None:
            self.strayed = True
            return
        for skipped in range(self._forward_cursor, position):
            self._fetch(skipped)
            self._pass(self.units[order[skipped]], training)
        self._fetch(position)
        self._forward_cursor = position + 1

    def _pass(self, unit: Runnable, training: bool) -> None:
        """Take part in the gather of a unit that only other ranks run.

        Before the ranks have agreed on an order it may still come here, and must then find its weights: gathering them
        again would be a collective that the others do not expect.
        """
        unit.wait()
        if self.order.agreed:
            self._put_down(unit, training)

    # -- backward ----------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        self.in_backward, self._backward_cursor, self._held_back = True, 0, ()
        self.closed.clear()

    def enter_backward(self, unit: Runnable) -> None:
        """Backward of `unit` begins; returns once its weights may be read."""
        self._awaited.discard(unit.index)
        position = _find(self.order.backward, unit.index, self._backward_cursor)
        if position is not None:
            self._backward_to(position)
        unit.wait()

    def end_backward(self) -> None:
        """Autograd is done: run the program to its end. `finish` must follow."""
        last = len(self.order.backward) - 1
        if self._backward_cursor <= last:
            self._backward_to(last)
            self.units[self.order.backward[last]].wait()
        self._awaited.clear()
        for unit in self.units:
            unit.rest()
        for index in self.order.remaining:
            self._close(self.units[index])

    def finish(self) -> None:
        """Wait for every reduction under way."""
        self._finish_reducing()
        self.in_backward = False

    def abandon_backward(self) -> None:
        """A backward raised, here and on every other rank: let go of what it left behind."""
        for _, transfer in self._reducing:
            with contextlib.suppress(RuntimeError, OSError):
                transfer.finish()
        self._reducing.clear()
        with contextlib.suppress(RuntimeError, OSError):
            self._fetch_held_back()  # a rank that came a little further has done so
        self.in_backward = False
        self._awaited.clear()
        for unit in self.units:
            with contextlib.suppress(RuntimeError, OSError):
                unit.rest()

    def _backward_to(self, position: int) -> None:
        """Run the program up to `position`: the same calls in the same order on every rank."""
        order = self.order
        for step in range(self._backward_cursor, position + 1):
            self.halfway()  # where this rank's data has not led there
            ended = [self.units[index] for index in order.closes[step]]
            for unit in ended:
                if unit.index not in self._awaited:  # else its backward is still to come
                    unit.rest()
            running = self.units[order.backward[step]]
            running.fetch()
            for unit in ended:
                self._close(unit)
            ahead = order.backward[step + 1 : step + 1 + self.prefetch]
            self._held_back = [index for index in ahead if self.units[index].regathered]
            if not (self._reducing and running.fills_gradually):
                self._fetch_held_back()
            if step < position:
                running.wait()
        self._backward_cursor = position + 1

    def holds_back(self, unit: Runnable) -> bool:
        """Whether a gather waits for half of the gradient of `unit`."""
        return bool(self._held_back) and self.order.backward[self._backward_cursor - 1] == unit.index

    def halfway(self) -> None:
        """Half of the running unit's gradient is there: make room for the next weights, and start gathering them.

        A rank that skips the unit does the same when the program passes by, so that all issue the same collectives in
        the same order.
        """
        if self._held_back:
            self._finish_reducing()
        self._fetch_held_back()

    def _fetch_held_back(self) -> None:
        for index in self._held_back:
            self.units[index].fetch()
        self._held_back = ()

    def _finish_reducing(self) -> None:
        for unit, transfer in self._reducing:
            transfer.finish()
            self._tell(unit)
        self._reducing.clear()

    def _tell(self, unit: int) -> None:
        if not self.accumulating:
            self.reduced(unit)

    def _fetch(self, position: int) -> None:
        """Start gathering the unit at `position` of forward and those to prefetch."""
        for index in self.order.forward[position : position + 1 + self.prefetch]:
            self.units[index].fetch()

    def _close(self, unit: Runnable) -> None:
        """The unit's gradients are complete: start summing them over ranks, unless this micro-batch only adds."""
        self.closed.add(unit.index)
        if unit.has_gradients and not self.sums_locally:
            self.start_reducing(unit)

    def start_reducing(self, unit: Runnable) -> None:
        """Start summing a unit's gradients, after moving the earlier reductions one collective on."""
        for reducing, transfer in self._reducing:
            transfer.advance()
            if transfer.done:
                self._tell(reducing)
        self._reducing = [(reducing, transfer) for reducing, transfer in self._reducing if not transfer.done]
        reduction = Transfer(unit.reduce(None if self.accumulating else self.denominator()))
        self._reducing.append((unit.index, reduction))

    @property
    def sums_locally(self) -> bool:
        """Whether this micro-batch's gradients are only added to what is on this rank."""
        return self.accumulating and not self.reduce_each

    # -- outside a step ----------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Every unit back to the plan's `weight` place."""
        self._awaited.clear()
        for unit in self.units:
            unit.rest()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Full weights of every unit."""
        for unit in self.units:
            unit.fetch()
        for unit in self.units:
            unit.wait()
        try:
            yield
        finally:
            self.rest()


def _find(order: Sequence[int], unit: int, start: int) -> int | None:
    for position in range(start, len(order)):
        if order[position] == unit:
            return position
    return None
