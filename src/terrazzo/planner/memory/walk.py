"""A training step on paper: when weights, gradients and activations come and go, and the most that is held at once.

The order of events is that of `terrazzo.engine.schedule`: gathers with prefetch, reductions behind backward.
It is described a second time here because a search would be slower on the schedule itself; tests hold both equal.
Units in the middle of a long row of equal ones do the same as their neighbours, so a row is shortened to a few, of
which one stands for all that were left out: what is held changes evenly along a row, and is most at one of its ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from terrazzo.planner.memory.states import Phase, UnitStates

__all__ = ["KINDS", "Peak", "StepSettings", "StepUnit", "peak_of"]

KINDS = ("gathered", "unreduced", "receive", "gradients", "activations", "working", "logits")
GATHERED, UNREDUCED, RECEIVE, GRADIENTS, ACTIVATIONS, WORKING, LOGITS = range(len(KINDS))


@dataclass(frozen=True)
class StepUnit:
    """`count` equal units in a row.

    Attributes:
        saved: bytes of activations that one keeps from forward to backward.
        working: bytes that its backward needs besides: what it recomputes, and gradients of activations.
    """

    states: UnitStates
    count: int = 1
    saved: float = 0.0
    working: float = 0.0


@dataclass(frozen=True)
class Peak:
    """Bytes by `KINDS` at the moment when most is held, and that moment in words."""

    parts: tuple[float, ...]
    moment: str

    @property
    def total(self) -> float:
        return sum(self.parts)


@dataclass(frozen=True)
class StepSettings:
    """How the units of a stage are run.

    Attributes:
        has_root: whether the first unit is the root, which encloses the others.
        loss: bytes of logits and of what the loss makes of them, at most.
        logits: of these, bytes that are there in the head's backward: the gradient of the logits.
        in_flight: activations of earlier micro-batches that wait for their backward, bytes.
        staged: gradients are reduced, and what stays between forward and backward goes, when every backward has run.
        local: micro-batches before the last only add gradients. whole: what these add up to stays from step to step.
        gradual: gradients come one after the other while a unit's backward runs.
        beside: chains of collectives run beside the computation, which waits for their ends alone: ranks on CUDA.
        with_gradients: count finished gradients that stay on the device too.
        update: bytes that the optimizer step needs.
    """

    has_root: bool = True
    prefetch: int = 1
    micro_batches: int = 1
    staged: bool = False
    local: bool = False
    whole: bool = False
    gradual: bool = True
    beside: bool = False
    loss: float = 0.0
    logits: float = 0.0
    in_flight: float = 0.0
    with_gradients: bool = True
    update: float = 0.0

    @property
    def has_sums(self) -> bool:
        """Whether a last micro-batch finds memory taken by what earlier ones left."""
        return self.micro_batches > 1 or (self.local and self.whole)


def peak_of(units: Sequence[StepUnit], settings: StepSettings) -> Peak:
    """The fullest moment of a step of these units, in the order in which they run."""
    walk = _Walk(_shortened(units, settings), settings)
    walk.begin()
    if settings.micro_batches > 2:
        walk.micro_batch(last=False)
    walk.micro_batch(last=not settings.staged)
    if settings.staged:
        walk.end_step()
    walk.update()
    return Peak(tuple(walk.best), walk.moment)


def _shortened(units: Sequence[StepUnit], settings: StepSettings) -> list[StepUnit]:
    """Rows of equal units as single ones: the first and last few, and between them one with the count of the rest."""
    window = settings.prefetch + 2
    row: list[StepUnit] = []
    for unit in units:
        single = replace(unit, count=1)
        if unit.count <= 2 * window + 1:
            row += [single] * unit.count
        else:
            row += [single] * window + [replace(unit, count=unit.count - 2 * window)] + [single] * window
    return row


class _Walk:
    """Goes through the events of a step and notes the fullest moment."""

    def __init__(self, units: list[StepUnit], settings: StepSettings) -> None:
        self.units, self.settings = units, settings
        self.now = [0.0] * len(KINDS)
        self.best, self.best_total, self.moment = list(self.now), -1.0, "at rest"
        self.present = [unit.states.full == 0 for unit in units]
        self.held = [False] * len(units)
        self.pending = [0] * len(units)
        self.partial = [False] * len(units)
        self.reducing: list[_Reduction] = []
        self.held_back: Sequence[int] = ()
        self.last = True

    def note(self, moment: str) -> None:
        total = sum(self.now)
        if total > self.best_total:
            self.best, self.best_total, self.moment = list(self.now), total, moment

    # -- the step --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before the last two micro-batches: what earlier ones have left."""
        if not self.settings.has_sums:
            return
        self.now[ACTIVATIONS] += self.settings.in_flight
        for index, unit in enumerate(self.units):
            states = unit.states
            if self.settings.local:
                self.pending[index] = states.pending_local
                self.now[UNREDUCED] += states.pending_local * unit.count
            elif states.trainable:
                self.partial[index] = True
                self.now[UNREDUCED] += states.partial * unit.count

    def micro_batch(self, last: bool) -> None:
        self.last = last
        self.forward()
        self.backward()

    def end_step(self) -> None:
        """In stages: weights go, and the gradients of all micro-batches are reduced, unit by unit."""
        for index in range(len(self.units)):
            self.release(index)
        self.last = True
        for unit in self.units:
            self.now[RECEIVE] += unit.states.copied
            self.note("while stages add what they share")
            self.now[RECEIVE] -= unit.states.copied
        for index in range(len(self.units) - 1, -1, -1):
            self.close(index)
            self.make_room()
            self.leave_gradients(self.units[index].states, self.units[index].count - 1)
        self.finish()

    def update(self) -> None:
        self.now[WORKING] += self.settings.update
        self.note("in the optimizer's update")
        self.now[WORKING] -= self.settings.update
        apart = max(unit.states.apart for unit in self.units)
        self.now[GATHERED] += apart
        self.note("while new weights are gathered")
        self.now[GATHERED] -= apart

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self) -> None:
        ahead, first = self.settings.prefetch, 1 if self.settings.has_root else 0
        if first:
            self.fetch(0)
            for index in range(1, min(len(self.units), 1 + ahead)):
                self.fetch(index)
            self.now[ACTIVATIONS] += self.units[0].saved
        for index in range(first, len(self.units)):
            for other in range(index, min(len(self.units), index + 1 + ahead)):
                self.fetch(other)
            self.now[ACTIVATIONS] += self.units[index].saved * self.units[index].count
            self.note("in forward")
            self.rest_between(index)
        if first:
            self.rest_between(0)
        self.now[LOGITS] += self.settings.loss
        self.note("at the loss")
        self.now[LOGITS] += self.settings.logits - self.settings.loss

    def fetch(self, index: int) -> None:
        if not self.present[index]:
            self.present[index] = True
            self.now[GATHERED] += self.units[index].states.full
            self.note("while gathering weights")

    def rest_between(self, index: int) -> None:
        unit = self.units[index]
        states = unit.states
        if states.keep:
            self.now[GATHERED] += states.full * (unit.count - 1)
        elif self.present[index] and states.full:
            if states.held and not self.held[index]:
                self.held[index] = True
                self.now[GATHERED] += states.held * unit.count
                self.note("in forward")
            self.release(index)

    def release(self, index: int) -> None:
        if self.present[index] and self.units[index].states.full:
            self.present[index] = False
            self.now[GATHERED] -= self.units[index].states.full

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        root = self.settings.has_root
        order = [0] if root else []
        order += range(len(self.units) - 1, len(order) - 1, -1)
        self.held_back = ()
        for position, index in enumerate(order):
            self.halfway()
            ended = order[position - 1] if position >= (2 if root else 1) else None
            if ended is not None:
                self.leave(ended)
            self.fetch(index)
            if self.settings.beside:
                self.drop_held(index)
                self.accumulate_gradients(index)  # their memory is the side's, from before the next reduction
            if ended is not None:
                self.close(ended)
            self.look_ahead(order[position + 1 : position + 1 + self.settings.prefetch], index)
            self.run_backward(index, root and index == 0)
        for index in order:
            self.leave(index)
        for index in (0, order[-1]) if root and len(order) > 1 else (order[-1],):
            self.close(index)
        self.finish()

    def look_ahead(self, ahead: Sequence[int], running: int) -> None:
        self.held_back = [index for index in ahead if self.units[index].states.regathered]
        gradual = self.settings.gradual and self.units[running].states.trainable
        if self.settings.beside:
            self.halfway()
        elif not (self.reducing and gradual):
            self.fetch_held_back()

    def run_backward(self, index: int, is_root: bool) -> None:
        """Backward of a unit: its weights are here, its activations go, its gradients come."""
        unit = self.units[index]
        self.drop_held(index)
        self.now[WORKING] += unit.working
        self.accumulate_gradients(index)
        self.note("at the head's backward" if is_root and self.settings.loss else "in backward")
        if is_root:
            self.now[LOGITS] -= self.settings.logits
        self.now[WORKING] -= unit.working
        self.halfway()
        if not is_root:
            self.now[ACTIVATIONS] -= unit.saved
        if unit.count > 1:
            self.pass_row(unit)

    def drop_held(self, index: int) -> None:
        """Full weights are here in place of what was kept from forward."""
        if self.held[index]:
            self.held[index] = False
            self.now[GATHERED] -= self.units[index].states.held

    def pass_row(self, unit: StepUnit) -> None:
        """The units that this one stands for have run backward too."""
        states, others = unit.states, unit.count - 1
        self.now[ACTIVATIONS] -= unit.saved * others
        self.now[GATHERED] -= (states.full if states.keep else states.held) * others
        self.leave_gradients(states, others)

    def leave_gradients(self, states: UnitStates, count: int) -> None:
        """What `count` units keep of their gradients after this micro-batch beside what they had before."""
        if not states.trainable:
            return
        if self.last:
            if self.settings.has_sums:
                self.now[UNREDUCED] -= (states.pending_local if self.settings.local else states.partial) * count
            self.now[GRADIENTS] += states.finished * count * self.settings.with_gradients

    def accumulate_gradients(self, index: int) -> None:
        states = self.units[index].states
        if states.trainable and not self.pending[index]:
            local = self.settings.local and not self.last
            self.pending[index] = states.pending_local if local else states.pending
            self.now[UNREDUCED] += self.pending[index]

    def leave(self, index: int) -> None:
        """Backward of the unit has ended: its weights go, but for what other micro-batches in flight find."""
        if not self.settings.staged or self.units[index].states.regathered:
            self.release(index)

    def close(self, index: int) -> None:
        states = self.units[index].states
        if not states.trainable or (self.settings.local and not self.last):
            return
        for reduction in self.reducing:
            self.advance(reduction)
        self.reducing = [reduction for reduction in self.reducing if not reduction.done]
        reduction = _Reduction(index, self.pending[index], states.reduction if self.last else states.early_reduction)
        self.pending[index] = 0
        self.now[UNREDUCED] -= reduction.pending
        self.now[RECEIVE] += reduction.pending  # until its first collective is in flight
        reduction.bytes = reduction.pending
        self.advance(reduction)
        if not reduction.done:
            self.reducing.append(reduction)

    def advance(self, reduction: _Reduction) -> None:
        """Its collective in flight has ended; the next one starts."""
        self.now[RECEIVE] -= reduction.bytes
        reduction.bytes = reduction.next_bytes()
        if not reduction.holds_pending:
            self.drop_partial(reduction.index)
        self.now[RECEIVE] += reduction.bytes
        if reduction.done:
            self.complete(reduction.index)
        self.note("while reducing gradients")

    def complete(self, index: int) -> None:
        states = self.units[index].states
        self.drop_partial(index)
        if self.last:
            self.now[GRADIENTS] += states.finished * self.settings.with_gradients
        else:
            self.partial[index] = True
            self.now[UNREDUCED] += states.partial

    def drop_partial(self, index: int) -> None:
        """The sum of earlier micro-batches has been added to that of this one."""
        if self.partial[index]:
            self.now[UNREDUCED] -= self.units[index].states.partial
            self.partial[index] = False

    def halfway(self) -> None:
        """Half of the running unit's gradient is there: make room for the next weights, and gather them."""
        if self.held_back:
            self.make_room()
        self.fetch_held_back()

    def fetch_held_back(self) -> None:
        for index in self.held_back:
            self.fetch(index)
        self.held_back = ()

    def make_room(self) -> None:
        """Unreduced gradients go; what else a chain beside the computation holds stays until it is waited for."""
        if not self.settings.beside:
            self.finish()
        for reduction in self.reducing:
            kept = reduction.bytes - reduction.pending
            if kept:
                self.now[RECEIVE] += kept - reduction.bytes
                reduction.bytes, reduction.pending = kept, 0
                self.drop_partial(reduction.index)
            else:
                self.advance(reduction)
        self.reducing = [reduction for reduction in self.reducing if not reduction.done]

    def finish(self) -> None:
        for reduction in self.reducing:
            while not reduction.done:
                self.advance(reduction)
        self.reducing = []


class _Reduction:
    """A unit's gradient on its way: which of its collectives is in flight, and the bytes held for it."""

    def __init__(self, index: int, pending: int, phases: tuple[Phase, ...]) -> None:
        self.index, self.pending, self.phases = index, pending, phases
        self.position = 0
        self.bytes = 0

    def next_bytes(self) -> int:
        self.position += 1
        if self.done:
            return 0
        return self.phases[self.position - 1][1] + (self.pending if self.holds_pending else 0)

    @property
    def holds_pending(self) -> bool:
        """Whether the unreduced gradient is still there."""
        return not self.done and self.phases[self.position - 1][0]

    @property
    def done(self) -> bool:
        return self.position > len(self.phases)
