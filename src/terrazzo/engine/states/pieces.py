"""A sharded model's and optimizer's state as named pieces, for whatever writes it down.

A piece is a run of elements of a rectangle of one parameter, under the parameter's own name: nothing of the plan, the
units or the mesh remains in it, so pieces written under one plan can be restored under any other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.gradients.residual import Residual
from terrazzo.engine.buckets.resting.buffer import Buffer, Resting
from terrazzo.engine.consensus.digest import digest
from terrazzo.engine.optim.driver import OptimizerDriver
from terrazzo.engine.optim.segment import Segment
from terrazzo.engine.plan.box import Owned
from terrazzo.engine.plan.diloco import OUTER_MOMENTUM
from terrazzo.engine.plan.kinds import numbered
from terrazzo.engine.plan.layout import Range, Slot
from terrazzo.engine.plan.rectangles import Rectangle, whole
from terrazzo.errors import Misuse, listed

__all__ = [
    "Piece",
    "average_pieces",
    "copied_pieces",
    "held_pieces",
    "model_pieces",
    "optimizer_pieces",
    "outer_pieces",
    "require_known_states",
    "residual_pieces",
]


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a rectangle of one state of one parameter.

    Attributes:
        name: the parameter's fully qualified name.
        kind: `weight`, `average`, or the optimizer's own key such as `exp_avg`; a state that is not per element, as
            `step` is, is given whole as [0, its number of elements).
        shape: the whole parameter's.
        numel: of the whole state.
        tile: the rectangle; the whole where ranks do not share the parameter, 1-D of a state with another `numel`.
        dtype: of the elements.
        read: gives them, 1-D: a view where they are in memory, a copy where they are in files.
    """

    name: str
    kind: str
    start: int
    stop: int
    shape: tuple[int, ...]
    numel: int
    tile: Rectangle
    dtype: torch.dtype
    read: Callable[[], Tensor] = field(repr=False, compare=False)

    @property
    def tensor(self) -> Tensor:
        """The elements, 1-D, read now."""
        return self.read()

    def digest(self) -> int:
        """A checksum of the elements' bytes; equal ones have equal ones on every rank."""
        return int(digest(self.tensor))


def _own_share(bucket: Bucket) -> Range:
    """What this rank gives of the states it holds: ranks that hold the same give a part of it each. Of replicas that
    train by themselves the first one does.
    """
    return _share_in_replica(bucket) if not bucket.sharding.axes.replica else Range(0, 0)


def _share_in_replica(bucket: Bucket) -> Range:
    """The same of states that each of such replicas has of its own."""
    axes = bucket.sharding.axes
    if not bucket.is_primary:
        return Range(0, 0)
    split = bucket.optim_axes
    return bucket.space.range((*split, *(axis for axis in axes.summed_over if axis not in split)))


def _copies(bucket: Bucket) -> Range:
    """All that this rank holds of a bucket's master weights and moments, whoever else holds it too."""
    return bucket.space.range(bucket.optim_axes)


def _copies_among(own: Sequence[Bucket], bucket: Bucket) -> Range:
    """The same, and nothing of others than its `own`."""
    return _copies(bucket) if bucket in own else Range(0, 0)


def model_pieces(buckets: list[Bucket], share: Callable[[Bucket], Range] = _own_share) -> Iterator[Piece]:
    """This rank's share of the weights, master weights where there are any; over all ranks each element comes once."""
    for bucket in buckets:
        yield from _pieces(bucket, "weight", bucket.master if bucket.trainable else bucket.weight, share(bucket))


def optimizer_pieces(driver: OptimizerDriver, share: Callable[[Bucket], Range] = _share_in_replica) -> Iterator[Piece]:
    """This rank's share of the optimizer's state; what is not per element comes with a parameter's first element."""
    replica = driver.sharding.axes.replica
    for segment in driver.segments:
        state = driver.optimizer.state.get(segment.parameter) or {}
        for slot, part in segment.slots():
            if not (own := share(segment.bucket).intersect(part)).numel:
                continue
            for kind, value in state.items():
                name = numbered(kind, replica)
                if segment.keeps_per_element(kind, value):
                    yield from (replace(piece, kind=name) for piece in _moment(segment, slot, kind, own, value))
                elif _has_first(segment.bucket, slot, own):
                    yield _undivided(segment.bucket, slot, name, torch.as_tensor(value).reshape(-1))


def require_known_states(drivers: Iterable[OptimizerDriver]) -> None:
    """Refuse states of which nothing was known when their optimizer came, and that nothing would restore.

    Raises:
        Misuse: where this rank holds any.
    """
    for driver, segment in ((each, segment) for each in drivers for segment in each.segments):
        state = driver.optimizer.state.get(segment.parameter) or {}
        if unknown := [key for key, value in state.items() if key not in segment.template and value is not None]:
            raise Misuse(
                f"This {driver.kind.__name__} keeps {listed([*map(repr, unknown)])} for param group {segment.group}, "
                "which a step with the settings that it had at tz.shard does not make: it could be neither saved nor "
                "loaded. Give it such settings before tz.shard, SGD its momentum say, and turn them off behind it "
                "until they are wanted; an optimizer of your own makes all of its states in its first step."
            )


def average_pieces(averages: Mapping[Bucket, Buffer], share: Callable[[Bucket], Range] = _own_share) -> Iterator[Piece]:
    """This rank's share of the weights' moving averages."""
    for bucket, average in averages.items():
        yield from _pieces(bucket, "average", average, share(bucket))


def outer_pieces(buckets: Sequence[Bucket]) -> Iterator[Piece]:
    """This rank's share of the momentum of outer steps, where there is any. The weights that they go on from are the
    model's, between two rounds.
    """
    for bucket in buckets:
        for momentum in bucket.outer[1:]:
            if bucket.is_primary and not bucket.sharding.axes.replica:
                yield from _pieces(bucket, OUTER_MOMENTUM, momentum, momentum.range)


def residual_pieces(buckets: Sequence[Bucket]) -> Iterator[Piece]:
    """This rank's share of the residuals of codes: each rank that has one of its own has a kind of its own."""
    for bucket in buckets:
        for residual in bucket.gradient.residuals if bucket.is_primary else ():
            _, axes, apart = residual.spec
            alike = (axis for axis in bucket.sharding.axes.summed_over if axis not in (*axes, *apart))
            yield from _residual(bucket, residual, bucket.space.range((*axes, *alike)))


def _residual(bucket: Bucket, residual: Residual, share: Range) -> Iterator[Piece]:
    """What `share` has of a residual; nothing of parameters of which another rank's gradient counts."""
    for slot, member in zip(bucket.slots, bucket.members, strict=True):
        own = share.intersect(slot.range)
        if own.numel and (number := residual.number_of(member.replicated)) is not None:
            yield from _stored(bucket, slot, numbered(residual.spec.kind, number[0]), own, residual.committed)


def copied_pieces(
    buckets: list[Bucket], drivers: Sequence[OptimizerDriver], averages: Mapping[Bucket, Buffer]
) -> Iterator[tuple[tuple[str, ...], list[Piece]]]:
    """Mesh axes along which ranks hold the same, and all that this rank holds of the states of which that is true."""
    yield from _copied_with_weights(buckets, drivers, averages)
    others: dict[tuple[str, ...], list[Piece]] = {}
    for bucket in buckets:
        axes = bucket.sharding.axes
        for residual in bucket.gradient.residuals:
            _, split, apart = residual.spec
            along = tuple(axis for axis in axes.live(axes.summed_over) if axis not in (*split, *apart))
            others.setdefault(along, []).extend(_residual(bucket, residual, residual.committed.range))
        for momentum in bucket.outer[1:]:  # the weights that a round began with are compared in each round
            along = axes.live(axis for axis in (*axes.summed_over, *axes.replicas) if axis not in bucket.outer_axes)
            others.setdefault(along, []).extend(_pieces(bucket, OUTER_MOMENTUM, momentum, momentum.range))
    yield from ((along, pieces) for along, pieces in others.items() if along)


def _copied_with_weights(
    buckets: list[Bucket], drivers: Sequence[OptimizerDriver], averages: Mapping[Bucket, Buffer]
) -> Iterator[tuple[tuple[str, ...], list[Piece]]]:
    """Of weights, their averages, and what optimizers keep, which are split alike."""
    alike: dict[tuple[bool, tuple[str, ...]], list[Bucket]] = {}
    for bucket in buckets:
        alike.setdefault((bucket.trainable, bucket.sharding.axes.summed_over), []).append(bucket)
    for (trainable, names), own in alike.items():
        split = own[0].optim_axes
        if along := own[0].sharding.axes.live(axis for axis in names if axis not in split):
            pieces = list(model_pieces(own, _copies))
            for driver in drivers if trainable else ():
                pieces += optimizer_pieces(driver, functools.partial(_copies_among, own))
            pieces += average_pieces({bucket: averages[bucket] for bucket in own if bucket in averages}, _copies)
            yield along, pieces


def held_pieces(buckets: list[Bucket], drivers: Sequence[OptimizerDriver]) -> Iterator[Piece]:
    """All that this rank holds of these buckets' weights, master weights where there are any, and moments."""
    yield from model_pieces(buckets, _copies)
    for driver in drivers:
        yield from optimizer_pieces(driver, functools.partial(_copies_among, buckets))


def _pieces(bucket: Bucket, kind: str, state: Resting, share: Range) -> Iterator[Piece]:
    """What `share` has of one state of a bucket, parameter by parameter."""
    for slot in bucket.slots:
        if (own := share.intersect(slot.range)).numel:
            yield from _stored(bucket, slot, kind, own, state)


def _stored(bucket: Bucket, slot: Slot, kind: str, elements: Range, state: Resting) -> Iterator[Piece]:
    def read(part: Range) -> Tensor:
        with state.opened(Range(elements.start + part.start, elements.start + part.stop)) as data:
            return data

    yield from _cut(bucket, slot, kind, elements, state.dtype, read)


def _moment(segment: Segment, slot: Slot, kind: str, elements: Range, value: Tensor) -> Iterator[Piece]:
    """One of the states that the optimizer keeps for each element; `value` is a stand-in where they are in files."""
    if value.is_meta:
        yield from _stored(segment.bucket, slot, kind, elements, segment.bucket.moments[kind])
        return
    part = value[elements.within(segment.range)]
    yield from _cut(segment.bucket, slot, kind, elements, value.dtype, lambda own: part[own.start : own.stop])


def _cut(
    bucket: Bucket, slot: Slot, kind: str, own: Range, dtype: torch.dtype, read: Callable[[Range], Tensor]
) -> Iterator[Piece]:
    """What the elements `own`, parts of which `read` gives, are of the whole parameter."""
    box = bucket.box(slot)
    for owned in box.owned(slot.own(own)):
        elements, numel = owned.elements, math.prod(box.shape)
        part = functools.partial(_part, owned, read)
        yield Piece(slot.name, kind, elements.start, elements.stop, box.shape, numel, owned.tile, dtype, part)


def _part(owned: Owned, read: Callable[[Range], Tensor]) -> Tensor:
    return owned.of(read(owned.inside)).reshape(-1)


def _has_first(bucket: Bucket, slot: Slot, elements: Range) -> bool:
    """Whether the first element of the whole parameter is among `elements`: one rank alone gives it."""
    parts = bucket.box(slot).owned(slot.own(elements))
    return any(not any(owned.tile.offsets) and not owned.elements.start for owned in parts)


def _undivided(bucket: Bucket, slot: Slot, kind: str, value: Tensor) -> Piece:
    """A state that is not per element."""
    shape, numel = bucket.box(slot).shape, value.numel()
    tile = whole(shape if math.prod(shape) == numel else (numel,))
    return Piece(slot.name, kind, 0, numel, shape, numel, tile, value.dtype, lambda: value)
