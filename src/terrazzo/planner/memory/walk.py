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

from terrazzo.planner.layout.stages import LastTurn
from terrazzo.planner.memory.step_settings import ACTIVATIONS, BUFFERS, LOGITS, WORKING, Peak, StepSettings, StepUnit
from terrazzo.planner.memory.unit_events import (
    GATHERED,
    GRADIENTS,
    NOTHING,
    RECEIVE,
    UNREDUCED,
    Change,
    ReducedPass,
    UnderWay,
)
from terrazzo.planner.memory.walk_state import AT_LOSS, FullestMoment, WalkedUnit

__all__ = ["peak_of"]


def peak_of(units: Sequence[StepUnit], settings: StepSettings) -> Peak:
    """The fullest moment of a step of these units, in the order in which they run, the root first."""
    walk = _Walk(_shortened(units, settings), settings)
    if settings.turns:
        walk.stages()
    else:
        walk.micro_batches()
    walk.update()
    if settings.updates_run_on and any(unit.events.gather_late != unit.events.gather for unit in units):
        walk.forward_behind_updates()
    return Peak(tuple(walk.best), walk.moment, walk.best_upper)


def _shortened(units: Sequence[StepUnit], settings: StepSettings) -> list[StepUnit]:
    """Rows of equal units as single ones: the first and last few, and between them one with the count of the rest.

    A few are as many as see each other's weights or reductions: of these several are under way where nobody makes room.
    """
    under_way = 1 if units[0].events.beside else max(unit.events.collectives for unit in units)
    window = max(settings.prefetch, under_way) + 2
    row: list[StepUnit] = []
    for unit in units:
        single = unit if unit.count == 1 else replace(unit, count=1)
        if unit.count <= 2 * window + 1:
            row += [single] * unit.count
        else:
            row += [single] * window + [replace(unit, count=unit.count - 2 * window)] + [single] * window
    return row


class _Walk(FullestMoment):
    """Goes through the events of a step and notes the fullest moment.

    Attributes:
        beside: reductions run beside the computation.
        reducing: reductions under way. `held_back`: units whose weights wait for room.
        is_last: the micro-batch is the step's last. `of_tables`: gradients of tables, which come as backward ends.
    """

    def __init__(self, units: Sequence[StepUnit], settings: StepSettings) -> None:
        super().__init__(settings.upper_shares)
        self.units, self.settings = [WalkedUnit(unit) for unit in units], settings
        self.beside = units[0].events.beside
        self.begin()

    def restart(self) -> None:
        """Nothing is held but weights at rest."""
        self.empty()
        for unit in self.units:
            unit.restart()
        self.begin()

    def begin(self) -> None:
        """Nothing of this step is under way."""
        self.add(RECEIVE, self.settings.under_way)
        self.reducing: list[UnderWay] = []
        self.held_back: Sequence[WalkedUnit] = ()
        self.is_last, self.of_tables = True, NOTHING

    # -- the step --------------------------------------------------------------------------------------------------

    def micro_batches(self) -> None:
        """One pass after the other: of the first, those in the middle and the last, what finds the most."""
        settings, count = self.settings, self.settings.micro_batches
        self.add(ACTIVATIONS, settings.in_flight)
        stay = settings.local and settings.whole
        if count > 2 or stay:
            self.leave_sums(self.units)
        if count > 2 or (count == 2 and not stay):
            self.micro_batch(is_last=False)
        self.micro_batch(is_last=True)

    def micro_batch(self, is_last: bool) -> None:
        self.is_last = is_last
        self.forward(self.units, ends_model=True)
        self.backward(self.units, ends_model=True)

    def stages(self) -> None:
        """Turns of stages, and then the sums of all micro-batches, unit by unit."""
        last = max(turn.chunk for turn in self.settings.turns)
        for turn in self.settings.turns:
            if row := [unit for unit in self.units if unit.chunk == turn.chunk]:
                self.turn(turn, row, ends_model=turn.chunk == last)
        self.restart()
        self.leave_sums(self.units)
        for unit in self.units:
            self.note_beside(RECEIVE, unit.events.copied, "while stages add what they share")
        for unit in reversed(self.units):
            self.close(unit)
            self.make_room()
            self.reduce_row(unit)
        self.finish()

    def turn(self, turn: LastTurn, row: Sequence[WalkedUnit], ends_model: bool) -> None:
        """Walk through one turn, with as many micro-batches in flight as there are at most, whatever turn it is."""
        self.restart()
        self.is_last = False
        others = sum(unit.saved * unit.count for unit in self.units if unit.chunk != turn.chunk)
        self.add(ACTIVATIONS, self.settings.in_flight + others)
        self.add(BUFFERS, self.settings.buffers)
        for unit in self.units:
            if unit.chunk in turn.forward_before:
                unit.was_here, unit.is_here, unit.rests = True, not unit.events.regathered, unit.events.regathered
                self.rest_row(unit)
                self.add(GATHERED, unit.events.between)
        self.leave_sums([unit for unit in self.units if unit.chunk in turn.backward_before])
        if turn.is_forward:
            return self.forward(row, ends_model)
        self.add(ACTIVATIONS, sum(unit.saved * unit.count for unit in row))
        self.add(LOGITS, self.settings.logits * ends_model)
        return self.backward(row, ends_model)

    def leave_sums(self, units: Sequence[WalkedUnit]) -> None:
        """Have the units hold what earlier micro-batches leave: gradients that add up, or their sums."""
        local = self.settings.local
        for unit in units:
            if unit.events.trainable:
                unit.has_pending = unit.only_adds = local
                unit.has_partial = not local
                self.add(UNREDUCED, unit.events.pending if local else unit.events.partial)
                self.sum_row(unit)

    def update(self) -> None:
        self.note_beside(WORKING, self.settings.update, "in the optimizer's update")
        for unit in self.units:
            self.apply(unit.events.publish, "while new weights are gathered")

    def forward_behind_updates(self) -> None:
        """The next step's first one, in which each unit's new weights come before they are gathered."""
        self.restart()
        self.add(BUFFERS, self.settings.buffers)
        for unit in self.units:
            unit.is_updating = True
        last = max(unit.chunk for unit in self.units)
        for chunk in range(last + 1):
            if row := [unit for unit in self.units if unit.chunk == chunk]:
                self.forward(row, ends_model=chunk == last)

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, row: Sequence[WalkedUnit], ends_model: bool) -> None:
        ahead, has_root = self.settings.prefetch, row[0].events.is_root
        if has_root:
            self.come_to(row[: 1 + ahead])
            self.add(ACTIVATIONS, row[0].saved)
        for place in range(has_root, len(row)):
            unit = row[place]
            self.come_to(row[place : place + 1 + ahead])
            self.add(ACTIVATIONS, unit.saved * unit.count)
            self.note_beside(WORKING, unit.working if unit.forward_only else 0, "in forward")
            self.rest_between(unit)
        if has_root:
            self.rest_between(row[0])
        if ends_model:
            self.add(LOGITS, self.settings.loss)
            self.note(AT_LOSS, self.settings.loss_extra * self.shares[LOGITS])
            self.add(LOGITS, self.settings.logits - self.settings.loss)

    def come_to(self, units: Sequence[WalkedUnit]) -> None:
        """Gather these; the weights of the first can be read."""
        for unit in units:
            if unit.events.reads_files and len(unit.arriving) > 1:
                self.bring(unit, one_part=True)
            self.fetch(unit)
        self.arrive(units[0])

    def fetch(self, unit: WalkedUnit) -> None:
        if not unit.is_here:
            first = unit.events.gather_late if unit.is_updating else unit.events.gather
            unit.arriving = unit.events.gather_again if unit.was_here else first
            unit.is_here, unit.was_here, unit.is_updating = True, True, False
            self.bring(unit, one_part=True)

    def arrive(self, unit: WalkedUnit) -> None:
        """Full weights can be read, in place of what `between` kept of them."""
        self.bring(unit)
        if unit.rests:
            unit.rests = False
            self.apply(unit.events.arrive, "while gathering weights")

    def rest_between(self, unit: WalkedUnit) -> None:
        if unit.events.regathered and unit.is_here:
            self.bring(unit)
            unit.is_here, unit.rests = False, True
            self.apply(unit.events.rest_between, "in forward")
        self.rest_row(unit)

    def rest_row(self, unit: WalkedUnit) -> None:
        """The units that this one stands for keep between forward and backward what it does."""
        if unit.count > 1 and not unit.row_between:
            unit.row_between = unit.events.between * unit.others
            self.add(GATHERED, unit.row_between)

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, row: Sequence[WalkedUnit], ends_model: bool) -> None:
        has_root, self.of_tables = row[0].events.is_root, NOTHING
        order = [unit for unit in reversed(row[has_root:]) if not unit.forward_only]
        order = [row[0], *order] if has_root else order
        for place, unit in enumerate(order):
            self.halfway()
            ended = order[place - 1] if place > has_root else None
            if ended is not None:
                self.leave(ended)
            self.fetch(unit)
            following = order[place + 1 : place + 1 + self.settings.prefetch]
            ahead = [other for other in following if other.events.regathered]
            (self.go_on_beside if self.beside else self.go_on_in_step)(unit, ended, ahead)
            self.run_backward(unit, has_root and place == 0, ends_model)
        self.apply(self.of_tables, "in backward")
        for unit in order:
            self.leave(unit)
        for unit in (unit for unit in row if unit.forward_only):
            self.leave_unused(unit)
        for unit in dict.fromkeys((*order[:has_root], *order[-1:])):
            self.close(unit)
        self.finish()

    def go_on_beside(self, unit: WalkedUnit, ended: WalkedUnit | None, ahead: Sequence[WalkedUnit]) -> None:
        """Reductions run beside the computation: gathers of what comes next follow right behind them."""
        self.arrive(unit)
        self.advance()
        if unit.events.trainable and not unit.has_pending:
            self.apply(unit.events.first_gradients[self.adds].ahead, "in backward")
        if ended is not None:
            self.close(ended)
        self.held_back = ahead
        self.halfway()

    def go_on_in_step(self, unit: WalkedUnit, ended: WalkedUnit | None, ahead: Sequence[WalkedUnit]) -> None:
        """The host waits for reductions: gathers of what comes next wait for half of the running unit's gradient."""
        if ended is not None:
            self.close(ended)
        self.held_back = ahead
        if not (self.reducing and self.settings.gradual and unit.events.trainable):
            self.fetch_held_back()
        self.arrive(unit)

    def run_backward(self, unit: WalkedUnit, is_root: bool, ends_model: bool) -> None:
        """Backward of a unit: its weights are here, its activations go, its gradients come."""
        late = self.begin_gradients(unit)
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
        self.add(ACTIVATIONS, -unit.saved)
        if unit.count > 1:
            self.pass_row(unit)

    @property
    def adds(self) -> bool:
        """Whether gradients of the pass only add up on this rank."""
        return self.settings.local and not self.is_last

    def begin_gradients(self, unit: WalkedUnit) -> Change:
        """Memory for those that come early; for the others it is left to the caller."""
        if unit.has_pending or not unit.events.trainable:
            return NOTHING
        unit.has_pending, unit.only_adds = True, self.adds
        first = unit.events.first_gradients[self.adds]
        self.apply(first.early, "in backward")
        return first.late

    def pass_row(self, unit: WalkedUnit) -> None:
        """The units that this one stands for have run backward too."""
        self.add(ACTIVATIONS, -unit.saved * unit.others)
        if not self.settings.turns:
            self.add(GATHERED, -unit.row_between)
            unit.row_between = 0
        if self.is_last:
            self.reduce_row(unit)
        else:
            self.sum_row(unit)

    def sum_row(self, unit: WalkedUnit) -> None:
        """They keep what their gradients have added up to."""
        if unit.others and not unit.row_sums:
            unit.row_sums = (unit.events.pending if self.settings.local else unit.events.partial) * unit.others
            self.add(UNREDUCED, unit.row_sums)

    def reduce_row(self, unit: WalkedUnit) -> None:
        """They keep finished gradients."""
        self.add(UNREDUCED, -unit.row_sums)
        unit.row_sums = 0
        self.add(GRADIENTS, unit.events.finished * unit.others * self.settings.with_gradients)

    def leave(self, unit: WalkedUnit) -> None:
        """Backward of the unit has ended: its weights go, but for what other micro-batches in flight find."""
        if self.settings.turns:
            self.rest_between(unit)
        elif unit.is_here:
            self.bring(unit)
            unit.is_here = unit.was_here = False
            self.apply(unit.events.release, "in backward")

    def leave_unused(self, unit: WalkedUnit) -> None:
        """Backward of all others has ended: what forward has left of the unit's weights goes, as `leave` has it."""
        if self.settings.turns:
            return
        self.add(GATHERED, -unit.row_between)
        unit.row_between = 0
        self.leave(unit)
        if unit.rests:
            self.add(GATHERED, -unit.events.between)
            unit.rests = unit.was_here = False

    def halfway(self) -> None:
        """Half of the running unit's gradient is there: make room for the next weights, and gather them."""
        if self.held_back:
            self.make_room()
        self.fetch_held_back()

    def fetch_held_back(self) -> None:
        for unit in self.held_back:
            self.fetch(unit)
        self.held_back = ()

    # -- reductions ------------------------------------------------------------------------------------------------

    def close(self, unit: WalkedUnit) -> None:
        """All gradients of the unit are there: start summing them over ranks."""
        if not unit.events.trainable or self.adds:
            return
        if not self.beside:
            self.advance()
        reduced = ReducedPass(self.is_last, unit.has_partial, unit.only_adds, self.settings.with_gradients)
        chain = unit.events.chain(reduced)
        unit.has_pending, unit.has_partial = False, not self.is_last
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
