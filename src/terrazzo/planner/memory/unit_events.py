"""What a unit adds to the memory of a rank, and takes off, at each event of a step.

What a bucket allocates and frees is said in `terrazzo.engine.plan.bucket_memory`, for the engine's dry run too. Events
of a unit's buckets are summed, one bucket after the other, to one `Change` for each event: what is there in the end,
and the most in between. So a unit is summed once, and a search walks through many steps of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from terrazzo.engine.plan import bucket_bytes, bucket_memory
from terrazzo.engine.plan.bucket_memory import Allocation, GivenBack, InFlight, StepMemory
from terrazzo.engine.plan.moves import GradientFate
from terrazzo.planner.caching import once
from terrazzo.planner.layout.buckets import PlannedBucket, buckets
from terrazzo.planner.layout.placement import Placement
from terrazzo.planner.model.shapes import UnitShape

__all__ = [
    "GATHERED",
    "GRADIENTS",
    "NOTHING",
    "RECEIVE",
    "UNREDUCED",
    "Chain",
    "Change",
    "ReducedPass",
    "UnderWay",
    "UnitEvents",
    "unit_events",
]

GATHERED, UNREDUCED, RECEIVE, GRADIENTS = range(4)
"""The kinds of `StepMemory` that are counted, as plain numbers, which are faster."""

Bytes = tuple[tuple[int, int], ...]
"""(kind, bytes), of kinds that have some."""


class Change(NamedTuple):
    """How what is held changes from one moment to the next, in bytes.

    Attributes:
        change: what has come in the end, or gone where it is negative; `net` of all kinds together.
        rise: the most that is held in between, beyond what was held before; `at_rise` by kind.
    """

    change: Bytes = ()
    net: int = 0
    rise: int = 0
    at_rise: Bytes = ()


NOTHING = Change()


class Chain(NamedTuple):
    """The reduction of a unit's gradients.

    Attributes:
        steps: the first at its begin; then what comes as each of its collectives ends, or as all of them do that run
            beside the computation.
        room: as what computation has lent to collectives beside it is given back; `after_room` as these end then.
    """

    steps: tuple[Change, ...]
    room: Change = NOTHING
    after_room: Change = NOTHING


class ReducedPass(NamedTuple):
    """A pass whose gradients are reduced.

    Attributes:
        last: it finishes them.
        has_partial: earlier micro-batches have left their sum.
        adds: these have been added up on this rank before.
        counted: finished gradients are counted.
    """

    last: bool
    has_partial: bool
    adds: bool
    counted: bool


class FirstGradients(NamedTuple):
    """Memory for a unit's gradients, which comes with the first of them in a backward.

    Attributes:
        ahead: as backward of the unit begins, where collectives run beside it.
        early, late: with the first gradient of each bucket, before half of the unit's elements have theirs and after.
            Of the root: before other units run backward and after, when gradients of tables come.
    """

    ahead: Change
    early: Change
    late: Change


class UnderWay:
    """A unit's gradient on its way: how far its chain has come, and whether what it was lent has been given back."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.position, self.has_given = chain, 0, False

    @property
    def done(self) -> bool:
        return self.position == len(self.chain.steps)

    def next_step(self) -> Change:
        self.position += 1
        return self.chain.after_room if self.has_given else self.chain.steps[self.position - 1]

    def give_room(self) -> Change:
        before, self.has_given = self.has_given, True
        return NOTHING if before else self.chain.room


@dataclass(eq=False)
class UnitEvents:
    """What each event of a step does to memory, of one unit on one rank.

    Each event is the one of that name in `bucket_memory`, summed over the unit's buckets.

    Attributes:
        is_root: whether it is what belongs to no other unit.
        beside: whether chains of collectives run beside the computation, which waits for their ends alone: on CUDA.
        regathered: whether backward gathers weights again that forward has put down.
        trainable: whether any of its parameters is.
        gather: full weights are asked for, where none are here; last, on CPU, what has been sent of them in blocks of 8
            bits, or as codes, has come. On CUDA that runs behind the gather, of which it is then a part.
        gather_again: the same in backward, of the buckets that do not stay from forward to backward.
        gather_late: the same behind an update away from the device that runs on into a forward: new weights come
            before, where that takes memory, up to each point at which the host waits.
        publish: new weights come at a step's end, one bucket after the other.
        rest_between: forward has ended.
        arrive: full weights can be read in place of what `rest_between` has kept.
        release: all full weights go.
        between: bytes that stay between forward and backward.
        pending: of an unreduced gradient that only adds up on this rank. `partial`: of sums of earlier micro-batches.
            `finished`: of finished gradients, from the end of backward on. All on the device.
        copied: as the gradients of other stages that have the same parameters come to be added.
        reads_files: whether weights at rest are in files.
        collectives: of the reduction that finishes its gradients, one after the other.
        first_gradients: of a backward whose gradients are summed over ranks, and of one whose gradients only add up.
        trained: its buckets that are trainable.
    """

    is_root: bool
    beside: bool
    regathered: bool
    trainable: bool
    gather: tuple[Change, ...]
    gather_again: tuple[Change, ...]
    gather_late: tuple[Change, ...]
    publish: Change
    rest_between: Change
    arrive: Change
    release: Change
    between: int
    pending: int
    partial: int
    finished: int
    copied: int
    reads_files: bool
    collectives: int
    first_gradients: tuple[FirstGradients, FirstGradients]
    trained: Sequence[PlannedBucket]
    _chains: dict[ReducedPass, Chain] = field(default_factory=dict)

    def chain(self, reduced: ReducedPass) -> Chain:
        """The reduction of a micro-batch's gradients."""
        if (chain := self._chains.get(reduced)) is None:
            chain = self._chains[reduced] = _chain(self.trained, reduced)
        return chain


@once
def unit_events(unit: UnitShape, placement: Placement) -> UnitEvents:
    """The events of a unit, summed over its buckets."""
    own = buckets(unit, placement)
    trained = [bucket for bucket in own if bucket.trainable]
    again = [bucket for bucket in own if bucket.regathered]
    early, late = _early_and_late(unit, own)
    pending = [bucket_bytes.pending_bytes(bucket, GradientFate.LOCAL) for bucket in trained]
    return UnitEvents(
        is_root=unit.is_root,
        beside=not own[0].on_host,
        regathered=bool(again),
        trainable=bool(trained),
        gather=_gather(own),
        gather_again=_gather(again, again=True),
        gather_late=_gather(own, publishes=any(map(bucket_memory.publishes_late, own))),
        publish=_sum_of(_allocated(bucket_memory.publish(b)) for b in trained),
        rest_between=_sum_of(bucket_memory.rest_between(b, is_kept=b.weight_wire.codes_stay) for b in again),
        arrive=_sum_of(bucket_memory.arrive(b) for b in again),
        release=_sum_of(bucket_memory.release(b) for b in own),
        between=sum(bucket_bytes.staying_bytes(b) for b in own),
        pending=sum(pending),
        partial=sum(bucket_bytes.partial_bytes(b) for b in trained),
        finished=sum(bucket_bytes.finished_bytes(b) for b in trained),
        copied=max(map(bucket_bytes.copied_bytes, trained, pending), default=0),
        reads_files=any(b.tiers.weight == "nvme" for b in own),
        collectives=sum(move.steps for b in trained for move in (*b.sums.last.partial, *b.sums.last.finish)),
        first_gradients=(
            _first_gradients(early, late, GradientFate.REDUCED),
            _first_gradients(early, late, GradientFate.LOCAL),
        ),
        trained=trained,
    )


def _sum_of(events: Iterable[Iterable[Allocation]]) -> Change:
    """One event of several buckets as one change."""
    steps = _Steps()
    for allocations in events:
        steps.take_all(allocations)
    return steps.end()


def _gather(own: Sequence[PlannedBucket], again: bool = False, publishes: bool = False) -> tuple[Change, ...]:
    """The parts of a gather; in the last one, that which has been sent is decoded where the host waits for it."""
    parts, gather, decode = list[Change](), _Steps(), _Steps()
    for bucket in own if publishes else ():
        for event in bucket_memory.publish(bucket) if bucket.trainable else ():
            if isinstance(event, Allocation):
                gather.take(*event)
            elif bucket.on_host or event.move is None:
                parts.append(gather.end())
    for bucket in own:
        from_between = again and bucket_bytes.between_bytes(bucket) > 0
        gather.take_all(bucket_memory.gather(bucket, from_between))
        (decode if bucket.on_host else gather).take_all(bucket_memory.decode(bucket, from_between))
    return (*parts, gather.end(), decode.end())


def _allocated(events: Iterable[Allocation | InFlight]) -> Iterator[Allocation]:
    return (event for event in events if isinstance(event, Allocation))


class _Steps:
    """What is taken and given back one after the other."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._now, self._most, self._at_most = [0] * 4, 0, [0] * 4

    def take(self, kind: int, count_bytes: int) -> None:
        """Or give back, where that is negative."""
        self._now[kind] += count_bytes
        if (total := sum(self._now)) > self._most:
            self._most, self._at_most = total, list(self._now)

    def take_all(self, allocations: Iterable[Allocation]) -> None:
        for kind, count_bytes in allocations:
            self.take(kind, count_bytes)

    def add(self, change: Change) -> None:
        """All of a change."""
        if (most := sum(self._now) + change.rise) > self._most:
            self._most, self._at_most = most, list(self._now)
            for kind, count_bytes in change.at_rise:
                self._at_most[kind] += count_bytes
        for kind, count_bytes in change.change:
            self._now[kind] += count_bytes

    def turn(self, kind: int, other: int, count_bytes: int) -> None:
        """What is there of a kind becomes of the other."""
        self._now[kind] -= count_bytes
        self._now[other] += count_bytes

    def end(self) -> Change:
        """All of that; what comes from now on is another change."""
        change = Change(_some(self._now), sum(self._now), self._most, _some(self._at_most))
        self._begin()
        return change


def _some(by_kind: Sequence[int]) -> Bytes:
    return tuple((kind, count_bytes) for kind, count_bytes in enumerate(by_kind) if count_bytes)


# -- gradients -----------------------------------------------------------------------------------------------------


def _early_and_late(
    unit: UnitShape, own: Sequence[PlannedBucket]
) -> tuple[Sequence[PlannedBucket], Sequence[PlannedBucket]]:
    """The buckets whose first gradient comes early, and late: see `FirstGradients`. The last tensor's comes first."""
    bucket_of = {place: bucket for bucket in own if bucket.trainable for place in bucket.places}
    half, filled = sum(unit.tensors[place].numel for place in bucket_of), 0
    early, late = dict[PlannedBucket, None](), dict[PlannedBucket, None]()
    for place in sorted(bucket_of, reverse=True):
        is_late = unit.tensors[place].is_table if unit.is_root else 2 * filled >= half
        (late if is_late else early)[bucket_of[place]] = None
        filled += unit.tensors[place].numel
    return list(early), [bucket for bucket in late if bucket not in early]


def _first_gradients(
    early: Sequence[PlannedBucket], late: Sequence[PlannedBucket], fate: GradientFate
) -> FirstGradients:
    def of(some: Sequence[PlannedBucket], ahead: bool) -> Change:
        here = [bucket for bucket in some if (bool(bucket.ranks) and not bucket.on_host) is ahead]
        return _sum_of([[Allocation(StepMemory.UNREDUCED, sum(bucket_bytes.pending_bytes(b, fate) for b in here))]])

    return FirstGradients(of([*early, *late], True), of(early, False), of(late, False))


def _chain(trained: Sequence[PlannedBucket], reduced: ReducedPass) -> Chain:
    maker = _ChainMaker(beside=any(not bucket.on_host for bucket in trained), counted=reduced.counted)
    pendings = [
        bucket_bytes.pending_bytes(bucket, GradientFate.LOCAL if reduced.adds else GradientFate.REDUCED)
        for bucket in trained
    ]
    maker.now.turn(UNREDUCED, RECEIVE, sum(pendings))
    for bucket, pending in zip(trained, pendings, strict=True):
        partial, fate = (
            bucket_bytes.partial_bytes(bucket) * reduced.has_partial,
            GradientFate.FINISHED if reduced.last else GradientFate.REDUCED,
        )
        for event in bucket_memory.reduction(bucket, fate, pending, partial):
            maker.go_on(event)
    return maker.end()


class _ChainMaker:
    """Puts a `Chain` together from the events of a reduction.

    Args:
        beside: it runs beside the computation: what it gives back stays until the computation has waited for it.
        counted: finished gradients are counted.
    """

    def __init__(self, beside: bool, counted: bool) -> None:
        self.now = _Steps()
        self._beside, self._counted, self._moves_nothing = beside, counted, True
        self._steps: list[Change] = []
        self._lent, self._kept, self._finished = _Steps(), _Steps(), 0

    def go_on(self, event: Allocation | GivenBack | InFlight) -> None:
        if isinstance(event, InFlight):
            self._fly(event.received_bytes)
        elif isinstance(event, GivenBack):
            later = self._lent if event.lent else self._kept
            (later if self._beside else self.now).take(event.kind, -event.nbytes)
        elif event.kind == GRADIENTS:
            self._finish(event.nbytes * self._counted)
        elif event.kind != StepMemory.SUMS:
            self.now.take(*event)

    def _fly(self, received_bytes: int) -> None:
        self._moves_nothing = False
        self.now.take(RECEIVE, received_bytes)
        if not self._beside:
            self._steps.append(self.now.end())
        self.now.take(RECEIVE, -received_bytes)

    def _finish(self, finished_bytes: int) -> None:
        """Finished gradients are there when the computation has waited for all of the chain."""
        if self._beside:
            self._finished += finished_bytes
        else:
            self.now.take(GRADIENTS, finished_bytes)

    def end(self) -> Chain:
        if not self._beside:
            return Chain((*self._steps, self.now.end()))
        self._kept.take(GRADIENTS, self._finished)
        lent, rest = self._lent.end(), self._kept.end()
        if self._moves_nothing:
            return Chain((self._in_turn(self.now.end(), lent, rest),))
        return Chain((self.now.end(), self._in_turn(lent, rest)), lent, rest)

    @staticmethod
    def _in_turn(*changes: Change) -> Change:
        steps = _Steps()
        for change in changes:
            steps.add(change)
        return steps.end()
