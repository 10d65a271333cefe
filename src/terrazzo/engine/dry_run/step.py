"""A dry run of a step: the real schedule run on units that count bytes instead of moving them.

Order, prefetch, release and reduction are the code that will run, and only the moves are replaced by their sizes. The
planner's search has a faster description of its own (`terrazzo.planner.memory.walk`), which tests hold equal to this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.comm.comm_streams import CommStreams
from terrazzo.engine.comm.label import Label
from terrazzo.engine.comm.tally import Tally
from terrazzo.engine.comm.traffic import Traffic
from terrazzo.engine.comm.transfer import Handle, Moves, Released
from terrazzo.engine.consensus.agreement import flags_numel
from terrazzo.engine.consensus.pass_end import MEETING_NUMEL, weights_are_split
from terrazzo.engine.optim.matrix_steps import dry_run_matrices
from terrazzo.engine.optim.template import Templates
from terrazzo.engine.plan.bucket_spec import BucketSpec, MoveBytes, Pass, When
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.plan.stages import Stages
from terrazzo.engine.schedule.order import contains
from terrazzo.engine.schedule.pipeline import PipelineSchedule
from terrazzo.engine.schedule.schedule import Schedule

__all__ = ["CountingBucket", "CountingUnit", "ExpectedGradient", "StepSpec", "dry_run", "parameters_of"]


@dataclass(frozen=True)
class StepSpec:
    """A step of which memory and traffic are to be known.

    Attributes:
        prefetch: units gathered ahead.
        micro_batches: forward and backward passes in the step.
        local_sums: whether those before the last only add their gradients on this rank.
        stages: of the model that this rank runs; None for a whole one.
        buffer_bytes: of the buffers of these, of which there are copies until every micro-batch has run.
    """

    prefetch: int
    micro_batches: int = 1
    local_sums: bool = False
    stages: Stages | None = None
    buffer_bytes: int = 0


def dry_run(units: Sequence[Unit], step: StepSpec, templates: Templates = ()) -> Tally:
    """Transient memory and traffic of one optimizer step on this rank.

    Args:
        units: in registration order; they need not be built.
        templates: what the optimizers keep for a parameter of each param group; none without.
    """
    tally, sharding = Tally(), units[0].sharding
    traffic, comm_streams = tally.traffic, sharding.axes.comm_streams and CommStreams(torch.device("meta"))
    counting = [CountingUnit(unit.name, unit.index, unit.buckets, unit.compiled, tally, comm_streams) for unit in units]
    for unit, counting_unit, following in zip(units, counting, [*units[1:], None], strict=True):
        counting_unit.expect_in_turn(unit.buckets, is_around=following is not None and contains(unit, following))
    meeting = (lambda label, wanted: _meet(sharding, traffic)) if weights_are_split(units) else None
    if step.stages is None:
        schedule = Schedule(counting, step.prefetch, meeting)
        earlier = Pass.ADDS if step.local_sums else Pass.REDUCES
        for index in range(step.micro_batches):
            schedule.set_pass(earlier if index < step.micro_batches - 1 else Pass.FINISHES)
            _forward(schedule, counting)
            _backward(schedule, counting)
            if schedule.this_pass is Pass.FINISHES or (schedule.meet is None and not step.local_sums):
                _record_control(sharding, traffic, flags_numel(units))
    else:
        chunks = step.stages.share_out([*map(parameters_of, units)])
        staged = PipelineSchedule(counting, chunks, step.prefetch, meeting)
        staged.begin_step()
        with tally.ledger.holding(step.buffer_bytes):
            for turn in step.stages.turns(step.micro_batches):
                staged.turn_to(turn.chunk, turn.ends_model)
                if turn.is_forward:
                    _forward(staged, [counting[place] for place in chunks[turn.chunk]])
                else:
                    _backward(staged, counting)
        staged.end_step()
        staged.end_backward()
        _record_control(sharding, traffic, flags_numel(units))
    if sharding.precision.loss_scaling:
        _record_control(sharding, traffic, 1)  # overflow
    dry_run_matrices([bucket for unit in units for bucket in unit.trainable()], templates, tally)
    for unit, counting_unit in zip(units, counting, strict=True):
        for bucket, counting_bucket in zip(unit.buckets, counting_unit.buckets, strict=True):
            if any(member.group >= 0 for member in bucket.members):
                counting_bucket.publish()
    return tally


def parameters_of(unit: Unit) -> list[str]:
    """All names of the parameters of a unit."""
    return [name for bucket in unit.buckets for member in bucket.members for name in member.names]


def _forward(schedule: Schedule, units: Sequence[CountingUnit]) -> None:
    inside: list[CountingUnit] = []
    forward = schedule.begin_forward(training=True)
    for unit in units:
        while inside and not contains(inside[-1], unit):
            forward.leave(inside.pop())
        forward.enter(unit)
        inside.append(unit)
    for unit in reversed(inside):
        forward.leave(unit)
    schedule.end_forward()


def _backward(schedule: Schedule, units: Sequence[CountingUnit]) -> None:
    """Gradients come in the reverse of the order in which parameters are registered, as far as places say."""
    backward, coming = schedule.begin_backward(), list[tuple[float, CountingUnit, ExpectedGradient]]()

    def come(until: float) -> None:
        while coming and coming[-1][0] > until:
            _, unit, gradient = coming.pop()
            unit.add_gradient(gradient, schedule.this_pass)
            backward.gradient_came(unit)

    for index in schedule.order.backward:
        unit = units[index]
        come(until=unit.last_place)
        backward.enter(unit)
        coming += [(gradient.place, unit, gradient) for gradient in unit.gradients]
        coming.sort(key=lambda each: each[0])
    come(until=-1)
    backward.end()
    schedule.end_backward()


def _meet(sharding: ShardingSpec, traffic: Traffic) -> int:
    _record_control(sharding, traffic, MEETING_NUMEL + 1)
    return 0


def _record_control(sharding: ShardingSpec, traffic: Traffic, numel: int) -> None:
    for _ in sharding.axes.live(sharding.axes.every):
        traffic.record("control", numel * torch.int64.itemsize)


class ExpectedGradient(NamedTuple):
    """Of one parameter.

    Attributes:
        place: of that among the parameters of the model; infinite where it may be used behind all of them.
        numel: elements of it, whole.
        bucket: number of its bucket in the unit.
    """

    place: float
    numel: int
    bucket: int


class CountingUnit:
    """Stands for a unit before `Schedule`, which cannot tell the difference.

    Args:
        buckets: of which it counts what they hold and send.
        compiled: whether its gradients come all at once.
        tally: where it counts that.
        comm_streams: as of `Unit`.

    Attributes:
        gradients: that come in a backward, in any order; none where nobody has said.
        last_place: the highest place of its parameters; infinite where it has none.
    """

    def __init__(
        self,
        name: str,
        index: int,
        buckets: Sequence[BucketSpec],
        compiled: bool,
        tally: Tally,
        comm_streams: CommStreams | None = None,
    ) -> None:
        self.name, self.index, self.comm_streams = name, index, comm_streams
        self.buckets = [CountingBucket(bucket, tally, beside=comm_streams is not None) for bucket in buckets]
        self.weights = CountingWeights(self.buckets)
        self.has_gradients = any(bucket.trainable for bucket in buckets)
        self.fills_gradually = self.has_gradients and not compiled
        self.gradients: list[ExpectedGradient] = []
        self.last_place: float = math.inf
        self._filled_numel = 0

    def expect_in_turn(self, buckets: Sequence[Bucket], is_around: bool) -> None:
        """Expect the gradients of the parameters in its buckets, one after the other.

        Of what several modules share, with the one that is registered first: the others have run backward by then.

        Args:
            is_around: there are units inside of this one. Its own parameters may be used behind these, wherever they
                are registered, but for a table, whose gradient comes when they have run.
        """
        members = [(number, member) for number, bucket in enumerate(buckets) for member in bucket.members]
        self.last_place = max((member.place for _, member in members), default=math.inf)
        for number, member in members:
            if buckets[number].trainable:
                place = math.inf if is_around and not member.is_table else member.place
                self.gradients.append(ExpectedGradient(place, math.prod(member.shape), number))

    def add_gradient(self, gradient: ExpectedGradient, this_pass: Pass) -> None:
        self.buckets[gradient.bucket].accumulate_gradients(this_pass)
        self._filled_numel += gradient.numel

    @property
    def half_filled(self) -> bool:
        return 2 * self._filled_numel >= sum(gradient.numel for gradient in self.gradients)

    def accumulate_gradients(self, this_pass: Pass) -> None:
        for bucket in self.buckets:
            bucket.accumulate_gradients(this_pass)

    def expect_gradients(self, this_pass: Pass) -> None:
        for bucket in self.buckets:
            if bucket.spec.ranks:
                bucket.accumulate_gradients(this_pass)

    def add_stages(self) -> None:
        for bucket in self.buckets:
            bucket.add_stages()

    def zero_grad(self, set_to_none: bool) -> None:
        """A dry run forgets nothing."""

    def reduce(self, denominator: float | None) -> Moves[None]:
        self._filled_numel = 0
        for bucket in self.buckets:
            if bucket.spec.trainable:
                yield from self.reduce_bucket(bucket, last=denominator is not None)

    def reduce_bucket(self, bucket: CountingBucket, last: bool) -> Moves[None]:
        """What `reduce` does of one bucket after the other."""
        return bucket.reduce(last)


class CountingWeights:
    """Those of such a unit."""

    def __init__(self, buckets: Sequence[CountingBucket]) -> None:
        self._buckets = buckets
        self.regathered = any(bucket.spec.regathered for bucket in buckets)

    @property
    def at_hand(self) -> bool:
        return all(bucket.present for bucket in self._buckets)

    def gather(self, label: Label, from_rest: bool = False) -> None:
        for bucket in self._buckets:
            bucket.gather()

    def advance(self) -> None:
        """Nothing is under way in a dry run."""

    def wait(self) -> None:
        for bucket in self._buckets:
            bucket.decode()
        for bucket in self._buckets:
            bucket.arrive()

    def rest_between(self) -> None:
        for bucket in self._buckets:
            bucket.rest_between()

    def release(self) -> None:
        for bucket in self._buckets:
            bucket.release()

    def rest(self) -> None:
        for bucket in self._buckets:
            bucket.release()
            bucket.drop_between()


class CountingBucket:
    """What a bucket holds at a moment of a step, in bytes.

    Args:
        beside: whether chains of collectives run beside the computation.
    """

    def __init__(self, spec: BucketSpec, tally: Tally, beside: bool) -> None:
        self._beside = beside
        self.spec, self._ledger, self._traffic = spec, tally.ledger, tally.traffic
        self.present = spec.resident
        self._between_bytes = self._pending_bytes = self._partial_bytes = self._arriving_bytes = 0

    def gather(self) -> None:
        if not self.present:
            self.present, spec = True, self.spec
            self._arriving_bytes = spec.arriving_bytes(spec.between_axes if self._between_bytes else spec.weight_axes)
            self._ledger.acquire(self._arriving_bytes)
            if spec.gathers_into_place or not self._arriving_bytes:
                self._ledger.acquire(spec.full_bytes)
            with self._ledger.holding(spec.scratch_bytes if self._arriving_bytes else 0):
                self._record(spec.collectives(When.BACKWARD if self._between_bytes else When.FORWARD))
            if spec.wire.codes_stay:
                self._keep_between()
            if self._beside:
                self.decode()

    def decode(self) -> None:
        """What was sent in blocks of 8 bits is decoded; before the host has waited for it where collectives run beside
        the computation.
        """
        if self._arriving_bytes:
            if not self.spec.gathers_into_place:
                self._ledger.acquire(self.spec.full_bytes)
            with self._ledger.holding(self.spec.scratch_bytes):
                self._ledger.release(self._arriving_bytes)
            self._arriving_bytes = 0

    def _record(self, moves: Iterable[MoveBytes]) -> None:
        for move in moves:
            self._traffic.record(move.kind, int(move.sent_bytes))

    def rest_between(self) -> None:
        if not self.spec.regathered:
            return
        self.decode()
        if self.present:
            self._keep_between()
        self._release_full()

    def _keep_between(self) -> None:
        if not self._between_bytes:
            self._between_bytes = self.spec.between_bytes
            self._ledger.acquire(self._between_bytes)

    def release(self) -> None:
        self.decode()
        if self.present and self.spec.wire.codes_stay:
            self.drop_between()
        self._release_full()

    def _release_full(self) -> None:
        if self.present and not self.spec.resident:
            self.present = False
            self._ledger.release(self.spec.full_bytes)

    def arrive(self) -> None:
        """Full weights can be read: what is kept in their place goes, but for codes."""
        if not self.spec.wire.codes_stay:
            self.drop_between()

    def drop_between(self) -> None:
        self._ledger.release(self._between_bytes)
        self._between_bytes = 0

    def accumulate_gradients(self, this_pass: Pass) -> None:
        if not self._pending_bytes:
            self._pending_bytes = self.spec.pending_bytes(this_pass)
            self._ledger.acquire(self._pending_bytes)

    def add_stages(self) -> None:
        others = max(0, len(self.spec.stages) - 1)
        with self._ledger.holding(self._pending_bytes * others):
            for _ in range(others):
                self._traffic.record("send", self._pending_bytes)

    def reduce(self, last: bool) -> Moves[None]:
        pending_bytes, self._pending_bytes = self._pending_bytes, 0
        reduction = self.spec.sums.of(last)
        yield from self._send(reduction.partial)
        if reduction.partial:
            yield Released(self._ledger, pending_bytes, lent=True)
            pending_bytes = 0
        if last:
            yield Released(self._ledger, self._partial_bytes, lent=True)
            self._partial_bytes = 0
        else:
            self._ledger.acquire(self.spec.partial_bytes - self._partial_bytes)
            self._partial_bytes = self.spec.partial_bytes
        self._ledger.acquire(reduction.beside_bytes)
        yield from self._send(reduction.finish)
        yield Released(self._ledger, reduction.beside_bytes)
        yield Released(self._ledger, pending_bytes, lent=True)

    def _send(self, moves: Sequence[MoveBytes]) -> Moves[None]:
        for move in moves:
            self._record([move])
            for step in range(move.steps):
                with self._ledger.holding(move.received_bytes * (step == 0)):
                    yield Handle(queued=True)

    def publish(self) -> None:
        with self._ledger.holding(self.spec.apart_bytes):
            self._record(self.spec.collectives(When.UPDATE))
