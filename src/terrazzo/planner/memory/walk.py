"""A training step by sizes alone: when weights, gradients and activations come and go, and the most that is held.

The order of events is that of `terrazzo.engine.schedule`: gathers with prefetch, reductions behind backward.
It is described a second time here because a search would be slower on the schedule itself; tests hold both equal.
What each event does to memory is put together beforehand, unit by unit (`UnitEvents`).

Units in the middle of a long row of equal ones do the same as their neighbours, so a row is shortened to a few, of
which one stands for all that were left out: what is held changes evenly along a row, and is most at one of its ends.
Of passes those are walked through that find the most: every later one finds what earlier ones have left, and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from terrazzo.planner.memory.stages import LastTurn
from terrazzo.planner.memory.step_settings import (
    ACTIVATIONS,
    BUFFERS,
    KINDS,
    LOGITS,
    WORKING,
    Peak,
    StepSettings,
    StepUnit,
)
from terrazzo.planner.memory.unit_events import (
    GATHERED,
    GRADIENTS,
    NOTHING,
    RECEIVE,
    UNREDUCED,
    Change,
    UnderWay,
)

__all__ = ["peak_of"]


def peak_of(units: Sequence[StepUnit], settings: StepSettings) -> Peak:
    """The fullest moment of a step of these units, in the order in which they run, the root first."""
    walk = _Walk(_shortened(units, settings), settings)
    if settings.turns:
        walk.stages()
    else:
        walk.micro_batches()
    walk.update()
    return Peak(tuple(walk.best), walk.moment)


def _shortened(units: Sequence[StepUnit], settings: StepSettings) -> list[StepUnit]:
    """Rows of equal units as single ones: the first and last few, and between them one with the count of the rest.

    A few are as many as see each other's weights or reductions: of these several are under way where nobody makes room.
    """
    under_way = 1 if units[0].changes.beside else max(unit.changes.collectives for unit in units)
    window = max(settings.prefetch, under_way) + 2
    row: list[StepUnit] = []
    for unit in units:
        single = unit if unit.count == 1 else replace(unit, count=1)
        if unit.count <= 2 * window + 1:
            row += [single] * unit.count
        else:
            row += [single] * window + [replace(unit, count=unit.count - 2 * window)] + [single] * window
    return row


class _Walk:
    """Goes through the events of a step and notes the fullest moment."""

    def __init__(self, units: list[StepUnit], settings: StepSettings) -> None:
        self.units, self.settings = units, settings
        self.changes = [unit.changes for unit in units]
        self.best, self.best_total, self.moment = [0.0] * len(KINDS), -1.0, "at rest"
        self.all, self.beside = range(len(units)), units[0].changes.beside
        self.restart()

    def restart(self) -> None:
        """Nothing is held but weights at rest."""
        count = len(self.units)
        self.now, self.total = [0.0] * len(KINDS), 0.0
        self.here, self.kept, self.held = [False] * count, [False] * count, [False] * count
        self.to_decode = [NOTHING] * count
        self.pending, self.partial, self.added = [False] * count, [False] * count, [False] * count
        self.rest_of_row, self.sums_of_row = [0] * count, [0] * count
        self.reducing: list[UnderWay] = []
        self.held_back: Sequence[int] = ()
        self.last, self.of_tables = True, NOTHING

    def apply(self, change: Change, moment: str) -> None:
        total, now = self.total, self.now
        if total + change.rise > self.best_total:
            self.best, self.best_total, self.moment = list(now), total + change.rise, moment
            for kind, count_bytes in change.at_rise:
                self.best[kind] += count_bytes
        for kind, count_bytes in change.change:
            now[kind] += count_bytes
        self.total = total + change.net

    def add(self, kind: int, count_bytes: float) -> None:
        self.now[kind] += count_bytes
        self.total += count_bytes

    def note(self, moment: str) -> None:
        if self.total > self.best_total:
            self.best, self.best_total, self.moment = list(self.now), self.total, moment

    # -- the step --------------------------------------------------------------------------------------------------

    def micro_batches(self) -> None:
        """One pass after the other: of the first, those in the middle and the last, what finds the most."""
        settings, count = self.settings, self.settings.micro_batches
        self.add(ACTIVATIONS, settings.in_flight)
        stay = settings.local and settings.whole
        if count > 2 or stay:
            self.leave_sums(self.all)
        if count > 2 or (count == 2 and not stay):
            self.micro_batch(last=False)
        self.micro_batch(last=True)

    def micro_batch(self, last: bool) -> None:
        self.last = last
        self.forward(self.all, ends_model=True)
        self.backward(self.all, ends_model=True)

    def stages(self) -> None:
        """Turns of stages, and then the sums of all micro-batches, unit by unit."""
        last = max(turn.chunk for turn in self.settings.turns)
        for turn in self.settings.turns:
            if row := [index for index in self.all if self.units[index].chunk == turn.chunk]:
                self.turn(turn, row, ends_model=turn.chunk == last)
        self.restart()
        self.leave_sums(self.all)
        for changes in self.changes:
            self.note_beside(RECEIVE, changes.copied, "while stages add what they share")
        for index in reversed(self.all):
            self.close(index)
            self.make_room()
            self.reduce_row(index)
        self.finish()

    def turn(self, turn: LastTurn, row: Sequence[int], ends_model: bool) -> None:
        """Of as many micro-batches as are in flight at most, whatever turn it is."""
        self.restart()
        self.last = False
        others = sum(unit.saved * unit.count for unit in self.units if unit.chunk != turn.chunk)
        self.add(ACTIVATIONS, self.settings.in_flight + others)
        self.add(BUFFERS, self.settings.buffers)
        for index in self.all:
            if self.units[index].chunk in turn.forward_before:
                self.kept[index], self.here[index] = True, not self.changes[index].regathered
                self.held[index] = self.changes[index].regathered
                self.rest_row(index)
                self.add(GATHERED, self.changes[index].between)
        self.leave_sums([index for index in self.all if self.units[index].chunk in turn.backward_before])
        if turn.is_forward:
            return self.forward(row, ends_model)
        self.add(ACTIVATIONS, sum(self.units[index].saved * self.units[index].count for index in row))
        self.add(LOGITS, self.settings.logits * ends_model)
        return self.backward(row, ends_model)

    def leave_sums(self, indices: Sequence[int]) -> None:
        """As if earlier micro-batches had run."""
        for index in indices:
            changes = self.changes[index]
            if changes.trainable:
                self.pending[index] = self.added[index] = self.settings.local
                self.partial[index] = not self.settings.local
                self.add(UNREDUCED, changes.pending if self.settings.local else changes.partial)
                self.sum_row(index)

    def update(self) -> None:
        self.note_beside(WORKING, self.settings.update, "in the optimizer's update")
        apart = max(changes.apart for changes in self.changes)
        self.note_beside(GATHERED, apart, "while new weights are gathered")

    def note_beside(self, kind: int, count_bytes: float, moment: str) -> None:
        self.add(kind, count_bytes)
        self.note(moment)
        self.add(kind, -count_bytes)

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, row: Sequence[int], ends_model: bool) -> None:
        ahead, units, has_root = self.settings.prefetch, self.units, self.changes[row[0]].is_root
        if has_root:
            self.come_to(row[: 1 + ahead])
            self.add(ACTIVATIONS, units[row[0]].saved)
        for place in range(has_root, len(row)):
            index = row[place]
            self.come_to(row[place : place + 1 + ahead])
            self.add(ACTIVATIONS, units[index].saved * units[index].count)
            self.note("in forward")
            self.rest_between(index)
        if has_root:
            self.rest_between(row[0])
        if ends_model:
            self.add(LOGITS, self.settings.loss)
            self.note("at the loss")
            self.add(LOGITS, self.settings.logits - self.settings.loss)

    def come_to(self, indices: Sequence[int]) -> None:
        """Gather these; the weights of the first can be read."""
        for index in indices:
            self.fetch(index)
        self.arrive(indices[0])

    def fetch(self, index: int) -> None:
        if not self.here[index]:
            changes, again = self.changes[index], self.kept[index]
            self.apply(changes.gather_again if again else changes.gather, "while gathering weights")
            self.to_decode[index] = changes.decode_again if again else changes.decode
            self.here[index] = self.kept[index] = True

    def arrive(self, index: int) -> None:
        """Full weights can be read, in place of what was kept from forward."""
        self.decode(index)
        if self.held[index]:
            self.held[index] = False
            self.apply(self.changes[index].arrive, "while gathering weights")

    def decode(self, index: int) -> None:
        """What was sent in blocks of 8 bits, or as codes, has come."""
        if self.to_decode[index] is not NOTHING:
            self.apply(self.to_decode[index], "while gathering weights")
            self.to_decode[index] = NOTHING

    def rest_between(self, index: int) -> None:
        changes = self.changes[index]
        if changes.regathered and self.here[index]:
            self.decode(index)
            self.here[index], self.held[index] = False, True
            self.apply(changes.rest_between, "in forward")
        self.rest_row(index)

    def rest_row(self, index: int) -> None:
        """The units that this one stands for keep between forward and backward what it does."""
        if self.units[index].count > 1 and not self.rest_of_row[index]:
            self.rest_of_row[index] = self.changes[index].between * (self.units[index].count - 1)
            self.add(GATHERED, self.rest_of_row[index])

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, row: Sequence[int], ends_model: bool) -> None:
        has_root, self.of_tables = self.changes[row[0]].is_root, NOTHING
        order = [row[0], *reversed(row[1:])] if has_root else [*reversed(row)]
        for place, index in enumerate(order):
            self.halfway()
            ended = order[place - 1] if place > has_root else None
            if ended is not None:
                self.leave(ended)
            self.fetch(index)
            following = order[place + 1 : place + 1 + self.settings.prefetch]
            ahead = [other for other in following if self.changes[other].regathered]
            (self.go_on_beside if self.beside else self.go_on_in_step)(index, ended, ahead)
            self.run_backward(index, has_root and place == 0, ends_model)
        self.apply(self.of_tables, "in backward")
        for index in order:
            self.leave(index)
        for index in dict.fromkeys((order[0], order[-1]) if has_root else (order[-1],)):
            self.close(index)
        self.finish()

    def go_on_beside(self, index: int, ended: int | None, ahead: Sequence[int]) -> None:
        """Reductions run beside the computation: gathers of what comes next follow right behind them."""
        self.arrive(index)
        self.advance()
        if self.changes[index].trainable and not self.pending[index]:
            self.apply(self.changes[index].first_gradients[self.adds].ahead, "in backward")
        if ended is not None:
            self.close(ended)
        self.held_back = ahead
        self.halfway()

    def go_on_in_step(self, index: int, ended: int | None, ahead: Sequence[int]) -> None:
        """The host waits for reductions: gathers of what comes next wait for half of the running unit's gradient."""
        if ended is not None:
            self.close(ended)
        self.held_back = ahead
        if not (self.reducing and self.settings.gradual and self.changes[index].trainable):
            self.fetch_held_back()
        self.arrive(index)

    def run_backward(self, index: int, is_root: bool, ends_model: bool) -> None:
        """Backward of a unit: its weights are here, its activations go, its gradients come."""
        unit, late = self.units[index], self.begin_gradients(index)
        moment = "at the head's backward" if is_root and ends_model and self.settings.loss else "in backward"
        self.add(WORKING, unit.working)
        self.note(moment)
        if is_root:
            self.of_tables = late
            self.add(LOGITS, -self.settings.logits * ends_model)
        elif late.net:
            self.halfway()
            self.apply(late, moment)
        self.add(WORKING, -unit.working)
        self.halfway()
        if not is_root:
            self.add(ACTIVATIONS, -unit.saved)
        if unit.count > 1:
            self.pass_row(index)

    @property
    def adds(self) -> bool:
        """Whether gradients of the pass only add up on this rank."""
        return self.settings.local and not self.last

    def begin_gradients(self, index: int) -> Change:
        """Memory for those that come early; for the others it is left to the caller."""
        changes = self.changes[index]
        if self.pending[index] or not changes.trainable:
            return NOTHING
        self.pending[index], self.added[index] = True, self.adds
        first = changes.first_gradients[self.adds]
        self.apply(first.early, "in backward")
        return first.late

    def pass_row(self, index: int) -> None:
        """The units that this one stands for have run backward too."""
        unit, others = self.units[index], self.units[index].count - 1
        self.add(ACTIVATIONS, -unit.saved * others)
        if not self.settings.turns:
            self.add(GATHERED, -self.rest_of_row[index])
            self.rest_of_row[index] = 0
        if self.last:
            self.reduce_row(index)
        else:
            self.sum_row(index)

    def sum_row(self, index: int) -> None:
        """They keep what their gradients have added up to."""
        changes, others = self.changes[index], self.units[index].count - 1
        if others and not self.sums_of_row[index]:
            self.sums_of_row[index] = (changes.pending if self.settings.local else changes.partial) * others
            self.add(UNREDUCED, self.sums_of_row[index])

    def reduce_row(self, index: int) -> None:
        """They keep finished gradients."""
        self.add(UNREDUCED, -self.sums_of_row[index])
        self.sums_of_row[index] = 0
        self.add(GRADIENTS, self.changes[index].finished * (self.units[index].count - 1) * self.settings.with_gradients)

    def leave(self, index: int) -> None:
        """Backward of the unit has ended: its weights go, but for what other micro-batches in flight find."""
        if self.settings.turns:
            self.rest_between(index)
        elif self.here[index]:
            self.decode(index)
            self.here[index] = self.kept[index] = False
            self.apply(self.changes[index].release, "in backward")

    def halfway(self) -> None:
        """Half of the running unit's gradient is there: make room for the next weights, and gather them."""
        if self.held_back:
            self.make_room()
        self.fetch_held_back()

    def fetch_held_back(self) -> None:
        for index in self.held_back:
            self.fetch(index)
        self.held_back = ()

    # -- reductions ------------------------------------------------------------------------------------------------

    def close(self, index: int) -> None:
        """All gradients of the unit are there: start summing them over ranks."""
        changes = self.changes[index]
        if not changes.trainable or self.adds:
            return
        if not self.beside:
            self.advance()
        chain = changes.chain(self.last, self.partial[index], self.added[index], self.settings.with_gradients)
        self.pending[index], self.partial[index] = False, not self.last
        reduction = UnderWay(chain)
        self.go_on(reduction)
        if not reduction.done:
            self.reducing.append(reduction)

    def advance(self) -> None:
        """Collectives in flight have ended, and the next ones start."""
        for reduction in self.reducing:
            self.go_on(reduction)
        self.reducing = [reduction for reduction in self.reducing if not reduction.done]

    def go_on(self, reduction: UnderWay) -> None:
        self.apply(reduction.next_step(), "while reducing gradients")

    def make_room(self) -> None:
        """Unreduced gradients go; what else a chain beside the computation holds stays until it is waited for."""
        if not self.beside:
            self.finish()
        for reduction in self.reducing:
            self.apply(reduction.give_room(), "while reducing gradients")

    def finish(self) -> None:
        for reduction in self.reducing:
            while not reduction.done:
                self.go_on(reduction)
        self.reducing = []
