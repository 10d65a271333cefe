"""How a unit changes what a rank holds, each time that the schedule of a step comes to it.

A unit's buckets come one after the other, in the order and with the sizes of `BucketSpec`, as in the engine and in its
dry run (`terrazzo.engine.dry_run.step`). What follows from a unit alone is put together once, so that a search can walk
through many steps of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from terrazzo.engine.plan.bucket_spec import MoveBytes, Pass
from terrazzo.planner.memory.buckets import PlannedBucket, buckets
from terrazzo.planner.memory.placement import Placement
from terrazzo.planner.model.shapes import UnitShape

__all__ = [
    "GATHERED",
    "GRADIENTS",
    "NOTHING",
    "RECEIVE",
    "UNREDUCED",
    "Chain",
    "Change",
    "UnderWay",
    "UnitChanges",
    "unit_changes",
]

GATHERED, UNREDUCED, RECEIVE, GRADIENTS = range(4)
"""Kinds of what is held: full weights, and what is kept of them between forward and backward; gradients that no
collective has taken, and sums of earlier micro-batches; gradients under way, and what arrives to be summed; finished
gradients."""

Bytes = tuple[tuple[int, int], ...]
"""(kind, bytes), of kinds that have some."""


class Change(NamedTuple):
    """Of what is held, from one moment to the next.

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


class Arrival(NamedTuple):
    """Of memory for a unit's gradients in a backward.

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
        given, self.has_given = self.has_given, True
        return NOTHING if given else self.chain.room


@dataclass(eq=False)
class UnitChanges:
    """Of one unit on one rank.

    Attributes:
        beside: whether chains of collectives run beside the computation, which waits for their ends alone: on CUDA.
        regathered: whether backward gathers weights again that forward has put down.
        trainable: whether any of its parameters is.
        gather: full weights come, where none are here. `again`: those that do not stay from forward to backward.
        arrive: where they are sent in blocks of 8 bits, these are decoded, which the computation waits for.
            `arrive_again`: after `again`.
        rest_between: forward has ended; `drop_between`: full weights are here in the place of what it has kept.
        release: all full weights go.
        between: bytes that stay between forward and backward.
        pending: of an unreduced gradient that only adds up on this rank. `partial`: of sums of earlier micro-batches.
            `finished`: of finished gradients, from the end of backward on. All on the device.
        copied: as the gradients of other stages that have the same parameters come to be added.
        apart: new weights that are gathered on the device on their way to where they rest, of one bucket at a time.
        collectives: of the reduction that finishes its gradients, one after the other.
    """

    is_root: bool
    beside: bool
    regathered: bool
    trainable: bool
    gather: Change
    again: Change
    arrive: Change
    arrive_again: Change
    rest_between: Change
    drop_between: Change
    release: Change
    between: int
    pending: int
    partial: int
    finished: int
    copied: int
    apart: int
    collectives: int
    arrivals: tuple[Arrival, Arrival]
    trained: Sequence[PlannedBucket]
    _chains: dict[tuple[bool, bool, bool, bool], Chain] = field(default_factory=dict)

    def chain(self, last: bool, has_partial: bool, adds: bool, counted: bool) -> Chain:
        """The reduction of a micro-batch's gradients.

        Args:
            last: it finishes them.
            has_partial: earlier micro-batches have left their sum.
            adds: these have been added up on this rank before.
            counted: finished gradients are counted.
        """
        key = (last, has_partial, adds, counted)
        if (known := self._chains.get(key)) is None:
            known = self._chains[key] = _chain(self.trained, *key)
        return known


@lru_cache(maxsize=8192)
def unit_changes(unit: UnitShape, placement: Placement) -> UnitChanges:
    """Of one such unit."""
    found = buckets(unit, placement)
    trained = [bucket for bucket in found if bucket.trainable]
    again = [bucket for bucket in found if bucket.regathered]
    stays = sum(bucket.full_bytes for bucket in found if not bucket.regathered)
    held = sum(bucket.between_bytes for bucket in again if not bucket.wire.codes_stay)
    codes = sum(bucket.between_bytes for bucket in again if bucket.wire.codes_stay)  # beside full weights, too
    rest = _Steps()
    for bucket in again:
        rest.take(GATHERED, 0 if bucket.wire.codes_stay else bucket.between_bytes)
        rest.take(GATHERED, -bucket.full_bytes)
    full_again = sum(bucket.full_bytes for bucket in again)
    gather, arrive = _gathered(found, from_rest=True)
    once_more, arrive_again = _gathered(again, from_rest=False)
    early, late = _first_gradients(unit, found)
    pending = [bucket.pending_bytes(Pass.ADDS) for bucket in trained]
    return UnitChanges(
        is_root=unit.is_root,
        beside=not found[0].on_host,
        regathered=bool(again),
        trainable=bool(trained),
        gather=gather,
        again=once_more,
        arrive=arrive,
        arrive_again=arrive_again,
        rest_between=rest.end(),
        drop_between=_one(GATHERED, -held),
        release=_one(GATHERED, -stays - full_again - codes),
        between=stays + held + codes,
        pending=sum(pending),
        partial=sum(bucket.partial_bytes for bucket in trained),
        finished=sum(_finished_bytes(bucket) for bucket in trained),
        copied=max((own * (len(b.stages) - 1) for own, b in zip(pending, trained, strict=True) if b.stages), default=0),
        apart=max(bucket.apart_bytes for bucket in found),
        collectives=sum(m.steps for b in trained for m in (*b.sums.last.partial, *b.sums.last.finish)),
        arrivals=(_arrival(early, late, Pass.REDUCES), _arrival(early, late, Pass.ADDS)),
        trained=trained,
    )


def _one(kind: int, count_bytes: int) -> Change:
    steps = _Steps()
    steps.take(kind, count_bytes)
    return steps.end()


def _gathered(found: Sequence[PlannedBucket], from_rest: bool) -> tuple[Change, Change]:
    """What is taken as gathers begin, and as the computation has what they bring; see `CountingBucket.gather`."""
    begun, arrived = _Steps(), _Steps()
    for bucket in found:
        if bucket.resident:
            continue
        is_kept = not from_rest and bucket.between_bytes
        arriving = bucket.arriving_bytes(bucket.between_axes if is_kept else bucket.weight_axes)
        begun.take(GATHERED, arriving)
        if bucket.gathers_into_place or not arriving:
            begun.take(GATHERED, bucket.full_bytes)
        if from_rest and bucket.wire.codes_stay and bucket.regathered:
            begun.take(GATHERED, bucket.between_bytes)  # beside full weights
        if arriving:
            begun.take(GATHERED, bucket.scratch_bytes)
            begun.take(GATHERED, -bucket.scratch_bytes)
            steps = arrived if bucket.on_host else begun
            steps.take(GATHERED, 0 if bucket.gathers_into_place else bucket.full_bytes)
            steps.take(GATHERED, bucket.scratch_bytes)
            steps.take(GATHERED, -bucket.scratch_bytes - arriving)
    return begun.end(), arrived.end()


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


def _first_gradients(
    unit: UnitShape, found: Sequence[PlannedBucket]
) -> tuple[Sequence[PlannedBucket], Sequence[PlannedBucket]]:
    """The buckets whose first gradient comes early, and late, as of `Arrival`. Tensors get theirs in reverse order."""
    bucket_of = {place: bucket for bucket in found if bucket.trainable for place in bucket.places}
    half, filled = sum(unit.tensors[place].numel for place in bucket_of), 0
    early, late = dict[PlannedBucket, None](), dict[PlannedBucket, None]()
    for place in sorted(bucket_of, reverse=True):
        is_late = unit.tensors[place].is_table if unit.is_root else 2 * filled >= half
        (late if is_late else early)[bucket_of[place]] = None
        filled += unit.tensors[place].numel
    return list(early), [bucket for bucket in late if bucket not in early]


def _arrival(early: Sequence[PlannedBucket], late: Sequence[PlannedBucket], this_pass: Pass) -> Arrival:
    def of(some: Sequence[PlannedBucket], ahead: bool) -> Change:
        here = [bucket for bucket in some if (bool(bucket.ranks) and not bucket.on_host) is ahead]
        return _one(UNREDUCED, sum(bucket.pending_bytes(this_pass) for bucket in here))

    return Arrival(of([*early, *late], True), of(early, False), of(late, False))


def _finished_bytes(bucket: PlannedBucket) -> int:
    here = bucket.tiers.grad == "device"
    return here * bucket.numel(bucket.optim_axes) * bucket.precision.accumulate.itemsize


def _chain(trained: Sequence[PlannedBucket], last: bool, has_partial: bool, adds: bool, counted: bool) -> Chain:
    """Arguments as of `UnitChanges.chain`."""
    reduction = _ChainMaker(beside=any(not bucket.on_host for bucket in trained))
    pendings = [bucket.pending_bytes(Pass.ADDS if adds else Pass.REDUCES) for bucket in trained]
    reduction.now.turn(UNREDUCED, RECEIVE, sum(pendings))
    for bucket, pending in zip(trained, pendings, strict=True):
        finished = _finished_bytes(bucket) * (last and counted)
        reduction.run(bucket, last, pending, bucket.partial_bytes * has_partial, finished)
    return reduction.end()


class _ChainMaker:
    """Puts a `Chain` together, as `CountingBucket.reduce` goes through it."""

    def __init__(self, beside: bool) -> None:
        self.now = _Steps()
        self._beside, self._moves_nothing = beside, True
        self._steps: list[Change] = []
        self._lent, self._kept, self._finished = _Steps(), _Steps(), 0

    def run(self, bucket: PlannedBucket, last: bool, pending: int, partial: int, finished: int) -> None:
        reduction = bucket.sums.of(last)
        self._move(reduction.partial)
        if reduction.partial:
            self._give_back(self._lent, RECEIVE, pending)
        if last:
            self._give_back(self._lent, UNREDUCED, partial)
        else:
            self.now.take(UNREDUCED, bucket.partial_bytes - partial)
        self.now.take(RECEIVE, reduction.beside_bytes)
        self._move(reduction.finish)
        self._give_back(self._kept, RECEIVE, reduction.beside_bytes)
        if not reduction.partial:
            self._give_back(self._lent, RECEIVE, pending)
        if self._beside:
            self._finished += finished
        else:
            self.now.take(GRADIENTS, finished)

    def _move(self, moves: Sequence[MoveBytes]) -> None:
        for move in moves:
            for received in (move.received_bytes, *[0] * (move.steps - 1)):
                self._moves_nothing = False
                self.now.take(RECEIVE, received)
                if not self._beside:
                    self._steps.append(self.now.end())
                self.now.take(RECEIVE, -received)

    def _give_back(self, later: _Steps, kind: int, count_bytes: int) -> None:
        """Now, or later where collectives run beside the computation, which has to wait for them."""
        (later if self._beside else self.now).take(kind, -count_bytes)

    def end(self) -> Chain:
        if not self._beside:
            return Chain((*self._steps, self.now.end()))
        self._kept.take(GRADIENTS, self._finished)
        lent, kept = self._lent.end(), self._kept.end()
        if self._moves_nothing:
            return Chain((self._in_turn(self.now.end(), lent, kept),))
        return Chain((self.now.end(), self._in_turn(lent, kept)), lent, kept)

    @staticmethod
    def _in_turn(*changes: Change) -> Change:
        steps = _Steps()
        for change in changes:
            steps.add(change)
        return steps.end()
