"""Units and buckets that count bytes in place of moving them, before the same `Schedule` as the engine's.

What each event takes is in `terrazzo.engine.plan.bucket_memory`; here is what is there now, and where it counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from terrazzo.engine.buckets.bucket_layout import BucketLayout
from terrazzo.engine.comm.comm_streams import CommStreams
from terrazzo.engine.comm.transfer import Handle, Moves, Released, Transfer
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic, kind_of_traffic
from terrazzo.engine.labels.label import Label
from terrazzo.engine.plan import bucket_bytes, bucket_memory
from terrazzo.engine.plan.bucket_memory import Allocation, GivenBack, InFlight, StepMemory
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.moves import Divisor, GradientFate, MoveBytes
from terrazzo.engine.schedule.gathered import BackwardToCome
from terrazzo.engine.schedule.schedule import Schedule

__all__ = ["CountingBucket", "CountingUnit", "ExpectedGradient", "StepCounts", "agree"]


class ExpectedGradient(NamedTuple):
    """The gradient of one parameter, which is still to come.

    Attributes:
        position: of the parameter among those of the model; infinite where it may be used after all of them.
        numel: elements of the whole parameter.
        bucket: number of its bucket in the unit.
    """

    position: float
    numel: int
    bucket: int


@dataclass(frozen=True)
class StepCounts:
    """Ledgers and counters of a step's bytes.

    Attributes:
        traffic: what is sent.
        transient: gathered weights, unreduced gradients, and what arrives.
        comm_streams: where chains of collectives run, beside the computation; None where the host waits for each.
        sums: sums of gradients, and finished ones, which a bill counts as they rest.
    """

    traffic: Traffic
    transient: Ledger
    comm_streams: CommStreams | None
    sums: Ledger = field(default_factory=Ledger)

    @property
    def by_kind(self) -> dict[StepMemory, Ledger]:
        """The ledger of each kind of memory."""
        beside = (StepMemory.GRADIENTS, StepMemory.SUMS)
        return {kind: self.sums if kind in beside else self.transient for kind in StepMemory}


class CountingUnit:
    """Stands for a unit before `Schedule`, which cannot tell the difference.

    Args:
        buckets: of which it counts what they hold and send.
        compiled: whether its gradients come all at once.
        forward_only: as of `UnitSpec`.
        counts: where it counts that.

    Attributes:
        gradients: that come in a backward, in any order; none where nobody has said.
        last_position: the highest position of its parameters; infinite where it has none.
    """

    def __init__(
        self,
        name: str,
        index: int,
        buckets: Sequence[BucketSpec],
        compiled: bool,
        forward_only: bool,
        counts: StepCounts,
    ) -> None:
        self.name, self.index, self.forward_only = name, index, forward_only
        self.comm_streams = counts.comm_streams
        self.buckets = [CountingBucket(bucket, counts) for bucket in buckets]
        self.weights = CountingWeights(self.buckets, counts.comm_streams)
        self.has_gradients = any(bucket.trainable for bucket in buckets)
        self.fills_gradually = self.has_gradients and not compiled
        self.gradients: list[ExpectedGradient] = []
        self.last_position: float = math.inf
        self._filled_numel = 0

    def expect_in_turn(self, buckets: Sequence[BucketLayout], is_around: bool) -> None:
        """Expect the gradients of the parameters in its buckets, one after the other.

        Of what several modules share, with the one that is registered first: the others have run backward by then.

        Args:
            is_around: there are units inside of this one. Its own parameters may be used after these, wherever they
                are registered, but for a table, whose gradient comes when they have run.
        """
        members = [(number, member) for number, bucket in enumerate(buckets) for member in bucket.members]
        self.last_position = max((member.position for _, member in members), default=math.inf)
        for number, member in members:
            if buckets[number].spec.trainable:
                position = math.inf if is_around and not member.is_table else member.position
                self.gradients.append(ExpectedGradient(position, math.prod(member.shape), number))

    def add_gradient(self, gradient: ExpectedGradient, fate: GradientFate) -> None:
        self.buckets[gradient.bucket].accumulate_gradients(fate)
        self._filled_numel += gradient.numel

    @property
    def backward_to_come(self) -> BackwardToCome:
        """What a schedule is told as its forward ends."""
        return BackwardToCome.NONE if self.forward_only else BackwardToCome.ANNOUNCED

    @property
    def half_filled(self) -> bool:
        return 2 * self._filled_numel >= sum(gradient.numel for gradient in self.gradients)

    def expect_gradients(self, fate: GradientFate) -> None:
        for bucket in self.buckets:
            if bucket.spec.ranks:
                bucket.accumulate_gradients(fate)

    def sum_tied(self) -> None:
        for bucket in self.buckets:
            if bucket.spec.trainable:
                bucket.sum_tied()

    def zero_grad(self, set_to_none: bool) -> None:
        """A dry run forgets nothing."""

    def reduce(self, divisor: Divisor, fate: GradientFate) -> Moves[None]:
        self._filled_numel = 0
        for bucket in self.buckets:
            if bucket.spec.trainable:
                yield from bucket.reduce(fate)


def agree(schedule: Schedule) -> None:
    """Make the program follow a first forward, as ranks do: backward does not come to units that it cannot reach."""
    if not schedule.order.agreed:
        schedule.program.follow(schedule.program.visits)


class CountingWeights:
    """The weights of a `CountingUnit`: gathered, kept and released in bytes."""

    def __init__(self, buckets: Sequence[CountingBucket], comm_streams: CommStreams | None) -> None:
        self._buckets, self._streams = buckets, comm_streams
        self.regathered = any(bucket.spec.regathered for bucket in buckets)
        self._reads_files = any(bucket.spec.tiers.weight == "nvme" for bucket in buckets)
        self._updating = False
        self._publishing: Transfer[None] | None = None

    def begin_update(self) -> None:
        """An update runs on: new weights come before they are gathered the next time."""
        self._updating = True

    @property
    def at_hand(self) -> bool:
        return self._publishing is not None or all(bucket.present for bucket in self._buckets)

    def gather(self, label: Label, from_rest: bool = False) -> None:
        if self._updating:
            self._updating, self._publishing = False, Transfer(self._publish_and_gather(), label, self._streams)
        else:
            self._gather()

    def _gather(self) -> None:
        for bucket in self._buckets:
            bucket.gather()

    def _publish_and_gather(self) -> Moves[None]:
        for bucket in self._buckets:
            if bucket.spec.trainable:
                yield from bucket.publish()
        self._gather()

    def advance(self) -> None:
        """Nothing else is under way in a dry run."""
        if self._publishing is not None and self._reads_files:
            self._publishing.advance()

    def wait(self) -> None:
        if self._publishing is not None:
            self._publishing.finish()
            self._publishing = None
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
    """A bucket at a moment of a step, in bytes: this keeps what is here, and asks `bucket_memory` for the rest.

    Args:
        counts: where it counts that, and what it sends.
    """

    def __init__(self, spec: BucketSpec, counts: StepCounts) -> None:
        self.spec, self._traffic, self._overlaps = spec, counts.traffic, counts.comm_streams is not None
        self._transient, self._ledgers = counts.transient, counts.by_kind
        self.present = spec.resident
        self._gathered_again = self._arrives = self._is_kept = False
        self._pending_bytes = self._partial_bytes = 0

    def _count(self, allocations: Iterable[Allocation]) -> None:
        for kind, nbytes in allocations:
            if nbytes < 0:
                self._ledgers[kind].release(-nbytes)
            else:
                self._ledgers[kind].acquire(nbytes)

    def gather(self) -> None:
        if not self.present:
            again = self._is_kept and bucket_bytes.between_bytes(self.spec) > 0
            self.present, self._gathered_again, self._arrives = True, again, True
            self._count(bucket_memory.gather(self.spec, again))
            self._is_kept = self._is_kept or self.spec.weight_wire.codes_stay
            self._record(self.spec.between_gathers if again else self.spec.weight_gathers)
            if self._overlaps:
                self.decode()

    def decode(self) -> None:
        """Decode what was sent in blocks of 8 bits, or as codes; before the host has waited for it where
        collectives run beside the computation.
        """
        if self._arrives:
            self._arrives = False
            self._count(bucket_memory.decode(self.spec, self._gathered_again))

    def _record(self, moves: Iterable[MoveBytes]) -> None:
        for move in moves:
            self._traffic.record(kind_of_traffic(move.kind, move.what), int(move.sent_bytes))

    def rest_between(self) -> None:
        if self.spec.regathered and self.present:
            self.decode()
            self._count(bucket_memory.rest_between(self.spec, self._is_kept))
            self.present, self._is_kept = False, True

    def release(self) -> None:
        if self.present and not self.spec.resident:
            self.decode()
            self._count(bucket_memory.release(self.spec))
            self.present, self._is_kept = False, self._is_kept and not self.spec.weight_wire.codes_stay

    def arrive(self) -> None:
        """Full weights can be read."""
        if self._is_kept:
            self._count(bucket_memory.arrive(self.spec))
            self._is_kept = self.spec.weight_wire.codes_stay

    def drop_between(self) -> None:
        if self._is_kept:
            self._count(bucket_memory.drop_between(self.spec))
            self._is_kept = False

    def accumulate_gradients(self, fate: GradientFate) -> None:
        if not self._pending_bytes:
            self._pending_bytes = bucket_bytes.pending_bytes(self.spec, fate)
            self._transient.acquire(self._pending_bytes)

    def sum_tied(self) -> None:
        with self._transient.holding(bucket_bytes.copied_bytes(self.spec, self._pending_bytes)):
            for _ in self.spec.tied_ranks[1:]:
                self._traffic.record("send", self._pending_bytes)

    def reduce(self, fate: GradientFate) -> Moves[None]:
        pending_bytes, self._pending_bytes = self._pending_bytes, 0
        partial_bytes = self._partial_bytes
        self._partial_bytes = 0 if fate is GradientFate.FINISHED else bucket_bytes.partial_bytes(self.spec)
        for event in bucket_memory.reduction(self.spec, fate, pending_bytes, partial_bytes):
            if isinstance(event, Allocation):
                self._count([event])
            elif isinstance(event, GivenBack):
                yield Released(self._ledgers[event.kind], event.nbytes, lent=event.lent)
            else:
                yield from self._fly(event)

    def _fly(self, event: InFlight) -> Moves[None]:
        if event.move is not None and event.is_first:
            self._record([event.move])
        with self._transient.holding(event.received_bytes):
            yield Handle(queued=event.move is not None)

    def publish(self) -> Moves[None]:
        """Bring new weights to where they rest."""
        for event in bucket_memory.publish(self.spec):
            if isinstance(event, Allocation):
                self._count([event])
            else:
                yield from self._fly(event)
