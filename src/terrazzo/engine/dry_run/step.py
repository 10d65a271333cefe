"""A dry run of a step: the real schedule run on units that count bytes instead of moving them.

Order, prefetch, release and reduction are the code that will run, and only the moves are replaced by their sizes:
`terrazzo.engine.plan.bucket_memory` says them. The planner's search counts the same in an order of its own, which is
faster (`terrazzo.planner.memory.walk`); tests hold it equal to this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from terrazzo.engine.buckets.unit_layout import UnitLayout, weights_are_split
from terrazzo.engine.comm.comm_streams import CommStreams
from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.consensus.agreement import exchanges_flags, flags_numel
from terrazzo.engine.consensus.pass_end import MEETING_NUMEL
from terrazzo.engine.dry_run.counting import CountingUnit, ExpectedGradient, StepCounts, agree
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.instrumentation.traffic import Traffic
from terrazzo.engine.labels.label import Label
from terrazzo.engine.optim.clipping import OVERFLOW_NUMEL
from terrazzo.engine.optim.matrices.matrix_steps import dry_run_matrices
from terrazzo.engine.optim.stock.template import Templates, matrix_needs
from terrazzo.engine.pipeline.pipeline_schedule import PipelineSchedule
from terrazzo.engine.pipeline.stages import Stages
from terrazzo.engine.plan.moves import GradientFate
from terrazzo.engine.schedule.gathered import BackwardToCome
from terrazzo.engine.schedule.order import Order, contains
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.engine.schedule.straying import Meet
from terrazzo.engine.schedule.visits import Event

__all__ = ["StepSpec", "dry_run", "parameters_of"]


@dataclass(frozen=True)
class StepSpec:
    """A step of which memory and traffic are to be known.

    Attributes:
        prefetch: units gathered ahead.
        micro_batches: forward and backward passes in the step.
        local_sums: whether those before the last only add their gradients on this rank.
        stages: of the model that this rank runs; None for a whole one.
        buffer_bytes: of the buffers of these, of which there are copies until every micro-batch has run.
        behind_updates: whether updates away from the device run on into its first forward, from the step before: new
            weights come there then, and not at the end.
        orders: of what ranks have been seen to run, for each program of the schedule; by default, and for one without
            visits, that of registration. In one that was seen backward may come to units that are frozen and in front
            of all that is trained: because of an input that requires gradients.
    """

    prefetch: int
    micro_batches: int = 1
    local_sums: bool = False
    stages: Stages | None = None
    buffer_bytes: int = 0
    behind_updates: bool = False
    orders: Sequence[Order] = ()

    @property
    def reached(self) -> set[int]:
        """Units to which backward has been seen to come."""
        return {unit for order in self.orders if order.visits for unit in order.backward}

    @classmethod
    def least(cls, prefetch: int, stages: Stages | None, buffer_bytes: int, orders: Sequence[Order] = ()) -> StepSpec:
        """A step with the fewest micro-batches: one, or of a model in stages as many as ranks have some."""
        micro_batches = 1 if stages is None else stages.ranks
        return cls(prefetch, micro_batches, stages is not None, stages, buffer_bytes, orders=orders)


def dry_run(units: Sequence[UnitLayout], step: StepSpec, templates: Templates = ()) -> Tally:
    """Transient memory and traffic of one optimizer step on this rank.

    Args:
        units: in registration order; a `UnitLayout` of each is enough.
        templates: what the optimizers keep for a parameter of each param group; none without.
    """
    tally, comm_streams = Tally(), units[0].comm_streams and CommStreams(torch.device("meta"))
    counts = StepCounts(tally.traffic, tally.ledger, comm_streams)
    counting = []
    reached = step.reached
    for unit in units:
        forward_only = unit.forward_only and unit.index not in reached
        counting.append(CountingUnit(unit.name, unit.index, unit.specs, unit.compiled, forward_only, counts))
    for unit, counting_unit, following in zip(units, counting, [*counting[1:], None], strict=True):
        is_around = following is not None and contains(counting_unit, following)
        counting_unit.expect_in_turn(unit.buckets, is_around)
        if step.behind_updates and any(bucket.spec.updated_off_device for bucket in unit.buckets):
            counting_unit.weights.begin_update()
    if step.stages is None:
        _run_whole(units, counting, step, tally)
    else:
        _run_stages(units, counting, step, step.stages, tally)
    if units[0].buckets[0].spec.precision.loss_scaling:
        _record_control(units, tally.traffic, OVERFLOW_NUMEL, beside=units[0].buckets[0].axes.stage_axis)
    dry_run_matrices([bucket for unit in units for bucket in unit.trainable()], matrix_needs(templates), tally)
    for unit, counting_unit in zip(units, counting, strict=True):
        for bucket, counting_bucket in zip(unit.buckets, counting_unit.buckets, strict=True):
            comes_in_forward = step.behind_updates and bucket.spec.updated_off_device
            if any(member.group >= 0 for member in bucket.members) and not comes_in_forward:
                Transfer(counting_bucket.publish()).finish()
    return tally


def parameters_of(unit: UnitLayout) -> list[str]:
    """All names of the parameters of a unit."""
    return [name for bucket in unit.buckets for member in bucket.members for name in member.names]


def _run_whole(units: Sequence[UnitLayout], counting: Sequence[CountingUnit], step: StepSpec, tally: Tally) -> None:
    schedule = Schedule(counting, step.prefetch, _meeting(units, tally.traffic))
    _take_orders(schedule, step)
    earlier = GradientFate.LOCAL if step.local_sums else GradientFate.REDUCED
    for index in range(step.micro_batches):
        schedule.set_fate(earlier if index < step.micro_batches - 1 else GradientFate.FINISHED)
        _forward(schedule, counting)
        _backward(schedule, counting)
        if exchanges_flags(schedule.fate, schedule):
            _record_control(units, tally.traffic, flags_numel(units))


def _run_stages(
    units: Sequence[UnitLayout], counting: Sequence[CountingUnit], step: StepSpec, stages: Stages, tally: Tally
) -> None:
    chunks = stages.share_out([*map(parameters_of, units)])
    schedule = PipelineSchedule(counting, chunks, step.prefetch, _meeting(units, tally.traffic))
    _take_orders(schedule, step)
    schedule.begin_micro_batches()
    with tally.ledger.holding(step.buffer_bytes):
        for turn in stages.turns(step.micro_batches):
            schedule.turn_to(turn.chunk, turn.ends_model)
            if turn.is_forward:
                _forward(schedule, [counting[index] for index in chunks[turn.chunk]])
            else:
                _backward(schedule, counting)
    schedule.end_micro_batches()
    schedule.end_backward()
    _record_control(units, tally.traffic, flags_numel(units))


def _take_orders(schedule: Schedule, step: StepSpec) -> None:
    for program, order in zip(schedule.programs, step.orders, strict=bool(step.orders)):
        if order.visits:
            program.take(order)


def _forward(schedule: Schedule, units: Sequence[CountingUnit]) -> None:
    if schedule.order.visits:
        _forward_again(schedule)
    else:
        _forward_in_turn(schedule, units)
    agree(schedule)


def _forward_again(schedule: Schedule) -> None:
    """As ranks have run it. Of visits without announced backward it is told apart by the order what they were."""
    forward, order = schedule.begin_forward(training=True), schedule.order
    backward = {*order.backward}
    for index, event in order.visits:
        unit = schedule.units[index]
        if event is Event.ENTER:
            forward.enter(unit)
        elif event is Event.LEAVE:
            forward.leave(unit)
        elif unit.has_gradients and index not in backward:  # its weights were read outside of its own forward
            forward.leave(unit, BackwardToCome.UNANNOUNCED)
        else:
            forward.leave(unit, BackwardToCome.NONE)
    schedule.end_forward()


def _forward_in_turn(schedule: Schedule, units: Sequence[CountingUnit]) -> None:
    inside: list[CountingUnit] = []
    forward = schedule.begin_forward(training=True)
    for unit in units:
        while inside and not contains(inside[-1], unit):
            ended = inside.pop()
            forward.leave(ended, ended.backward_to_come)
        forward.enter(unit)
        inside.append(unit)
    for unit in reversed(inside):
        forward.leave(unit, unit.backward_to_come)
    schedule.end_forward()


def _backward(schedule: Schedule, units: Sequence[CountingUnit]) -> None:
    """Gradients come in the reverse of the order in which units have run, those of a unit as its first call comes.

    Where units run as they are registered, in the reverse of the order of all parameters, as far as positions say.
    """
    place, order = _places(schedule.order), schedule.order
    backward, coming = schedule.begin_backward(), list[tuple[_UsedAt, CountingUnit, ExpectedGradient]]()

    def come(until: _UsedAt) -> None:
        while coming and coming[-1][0] > until:
            _, unit, gradient = coming.pop()
            unit.add_gradient(gradient, schedule.fate)
            backward.gradient_came(unit)

    def expect(unit: CountingUnit) -> None:
        coming.extend((place(unit.index, each.position), unit, each) for each in unit.gradients)
        coming.sort(key=lambda each: each[0])

    visited = {index for index, _ in order.visits} or {*order.backward}
    for index in visited - {*order.backward}:
        expect(units[index])
    first_calls = {index: position for position, index in enumerate(order.backward)}
    for position, index in ((position, index) for position, index in enumerate(order.backward) if index in visited):
        unit = units[index]
        come(until=place(index, unit.last_position))
        backward.enter(unit, backward.of_forward)
        if first_calls[index] == position:
            expect(unit)
    come(until=(-1, -1))
    backward.end()
    schedule.end_backward()


_UsedAt = tuple[float, float]


def _places(order: Order) -> Callable[[int, float], _UsedAt]:
    """Gives when the parameter of a unit, at that position among those of the model, is used in a forward."""
    begins = {unit: place for place, unit in reversed([*enumerate(order.forward)])}
    if [*order.forward] == sorted(begins):
        return lambda unit, position: (0, position)
    return lambda unit, position: (position if position == math.inf else begins[unit], position)


def _meeting(units: Sequence[UnitLayout], traffic: Traffic) -> Meet | None:
    def meet(label: Label, number: int) -> int:
        _record_control(units, traffic, MEETING_NUMEL)
        return 0

    return meet if weights_are_split(units) else None


def _record_control(units: Sequence[UnitLayout], traffic: Traffic, numel: int, beside: Iterable[str] = ()) -> None:
    """Count an exchange over the axes of `within_stage`, and those `beside` them."""
    axes = units[0].buckets[0].axes
    for _ in axes.live((*axes.within_stage, *beside)):
        traffic.record("control", numel * torch.int64.itemsize)
