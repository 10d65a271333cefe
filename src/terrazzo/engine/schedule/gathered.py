"""The units whose weights the program has gathered, from pass to pass, and when each is released."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Iterable, Sequence

from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.numbered import Names
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.runtime.calls import do_all
from terrazzo.engine.schedule.runnable import Runnable

__all__ = ["BackwardToCome", "GatheredWeights"]


class BackwardToCome(enum.Enum):
    """What is known of a unit's backward as its forward ends."""

    NONE = "none will come"
    ANNOUNCED = "it will be announced"
    UNANNOUNCED = "it may come, and nothing will tell: weights stay until a backward ends"
    RECOMPUTED = "the forward runs again in backward, and is to announce it then"


class GatheredWeights:
    """The gathered weights of one model's units. Only the schedule and its passes call this.

    Two things are distinguished. What the program has gathered is the same on every rank, and alone decides what is
    gathered next: `gather`, `leave_forward` and `leave_backward` change it. Which memory may go depends on this rank
    too, whose data may have led it elsewhere: a unit's weights stay here while its backward is awaited, resharded to
    `between` or whole.

    Args:
        units: in registration order.
        prefetch: how many units ahead of the running one are gathered.

    Attributes:
        step_in_flight: whether this is inside of a step whose micro-batches take turns: from its first forward to its
            last backward weights stay at `between`.
    """

    def __init__(self, units: Sequence[Runnable], prefetch: int) -> None:
        self.units, self.prefetch = units, prefetch
        self._here: set[int] = set()  # gathered by the program, and not resharded yet
        self._awaited: set[int] = set()  # units whose backward will be announced, or comes with any
        self._until_end: set[int] = set()  # of these, whose weights stay until backward ends
        self.step_in_flight = False
        self._names = Names(units=tuple(unit.name for unit in units))

    def label(self, purpose: Purpose, index: int = 0, number: int = 0) -> Label:
        """The label of an exchange of a unit's weights or gradients, in the pass of that number."""
        return Label(purpose, index, number, self._names)

    def gather(self, indices: Iterable[int], purpose: Purpose, number: int = 0) -> None:
        """The program comes to these units: start to gather those that it has not gathered yet."""
        for index in indices:
            if index in self._here:
                self.units[index].weights.advance()
            else:
                self._here.add(index)
                self.units[index].weights.gather(self.label(purpose, index, number))

    def gather_ahead(self, count: int) -> None:
        """Gather at least `count` units ahead of the running one from now on."""
        self.prefetch = max(self.prefetch, count)

    def has(self, unit: Runnable) -> bool:
        """Whether the program has gathered `unit`, and not resharded it yet; the same on every rank."""
        return unit.index in self._here

    def put_back(self, unit: Runnable) -> None:
        """Undo `gather`, outside of passes."""
        self._here.discard(unit.index)
        unit.weights.rest()

    # -- backwards to come -------------------------------------------------------------------------------------

    @property
    def awaits_backward(self) -> bool:
        """Whether an earlier forward still waits for its backward, or its backward raised."""
        return bool(self._awaited) and not self.step_in_flight

    def expect_backward(self, unit: Runnable, to_come: BackwardToCome = BackwardToCome.ANNOUNCED) -> None:
        """A forward of `unit` has ended."""
        if to_come in (BackwardToCome.ANNOUNCED, BackwardToCome.UNANNOUNCED):
            self._awaited.add(unit.index)
        if to_come is BackwardToCome.UNANNOUNCED:
            self._until_end.add(unit.index)

    def backward_came(self, unit: Runnable) -> None:
        """The backward of `unit` has been announced."""
        self._awaited.discard(unit.index)

    # -- weights that are resharded ----------------------------------------------------------------------------

    def reshard(self, unit: Runnable, backward_follows: bool) -> None:
        """A forward of `unit` has ended: its weights go to the plan's `between`, or to rest if no backward follows."""
        if unit.index not in self._until_end:
            unit.weights.rest_between() if backward_follows else unit.weights.release()

    def leave_forward(self, left: Iterable[int], backward_follows: bool) -> None:
        """The program has left these units in a forward."""
        resharded = (index for index in left if not backward_follows or self.units[index].weights.regathered)
        self._here.difference_update(resharded)

    def end_forward(self, backward_follows: bool) -> None:
        """A forward has ended everywhere: reshard what no announced backward will."""
        left = [unit for unit in self.units if not backward_follows or unit.index not in self._awaited]
        do_all(functools.partial(self.reshard, unit, backward_follows) for unit in left)

    def abandon_forward(self) -> None:
        """A forward raised."""
        self._here.clear()
        for unit in (unit for unit in self.units if unit.index not in self._until_end):
            with contextlib.suppress(RuntimeError, OSError):  # a gather that failed does so again
                unit.weights.release()

    def leave_backward(self, unit: Runnable, is_over: bool) -> None:
        """The program has left `unit` in a backward; `is_over`: so has this rank."""
        if not self.step_in_flight or unit.weights.regathered:
            self._here.discard(unit.index)
        if self.step_in_flight and is_over:
            self.reshard(unit, backward_follows=True)
        elif unit.index not in self._awaited and is_over:
            unit.weights.rest()

    def end_backward(self) -> None:
        """A backward has ended everywhere."""
        if self.step_in_flight:
            for unit in self.units:
                self.leave_backward(unit, is_over=True)
        else:
            self.rest()

    # -- steps -------------------------------------------------------------------------------------------------

    def begin_micro_batches(self) -> None:
        """A step of several micro-batches in flight begins: weights stay at the plan's `between` until it ends."""
        self.step_in_flight = True

    def rest(self) -> None:
        """A step is over: bring every unit back to the plan's `weight` place."""
        self._clear()
        do_all(unit.weights.rest for unit in self.units)

    def abandon_step(self) -> None:
        """Do as `rest` does where a pass of the step raised."""
        self._clear()
        for unit in self.units:
            with contextlib.suppress(RuntimeError, OSError):
                unit.weights.rest()

    def _clear(self) -> None:
        self.step_in_flight = False
        for units in (self._awaited, self._until_end, self._here):
            units.clear()
