"""A sharded model's and optimizer's state as named pieces, for whatever writes it down.

A piece is a run of elements of a rectangle of one parameter, under the parameter's own name: nothing of the plan, the
units or the mesh remains in it, so pieces written under one plan can be restored under any other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.resting.buffer import Resting
from terrazzo.engine.consensus.digest import digest
from terrazzo.engine.optim.driver import OptimizerDriver
from terrazzo.engine.optim.segments.segment import Segment
from terrazzo.engine.partition.box import Owned
from terrazzo.engine.partition.rectangles import Rectangle, whole
from terrazzo.engine.plan.layout import Range, Slot
from terrazzo.engine.states.saved_states import SavedState, copied_along, saved_weights, share_in_replica
from terrazzo.engine.states.state_names import numbered
from terrazzo.errors import Misuse
from terrazzo.messages import listed

__all__ = ["Piece", "copied_pieces", "held_pieces", "optimizer_pieces", "require_known_states", "state_pieces"]


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
        """A checksum of the elements' bytes; equal elements have the same on every rank."""
        return int(digest(self.tensor))


def state_pieces(saved: SavedState, share: Range) -> Iterator[Piece]:
    """Yield what `share` has of one state of a bucket, parameter by parameter."""
    bucket = saved.bucket
    for slot, member in zip(bucket.slots, bucket.members, strict=True):
        if (own := share.intersect(slot.range)).numel and (kind := saved.kind_of(member)) is not None:
            yield from _pieces_of_resting(bucket, slot, kind, own, saved.state)


def optimizer_pieces(driver: OptimizerDriver, share: Callable[[Bucket], Range] = share_in_replica) -> Iterator[Piece]:
    """Yield this rank's share of the optimizer's state; what is not per element comes with a parameter's first."""
    replica = driver.sharding.axes.replica
    for segment in driver.segments:
        state = driver.optimizer.state.get(segment.parameter) or {}
        for slot, part in segment.slots():
            if not (own := share(segment.bucket).intersect(part)).numel:
                continue
            for kind, value in state.items():
                name = numbered(kind, replica)
                if segment.keeps_per_element(kind, value):
                    pieces = _pieces_of_moment(segment, slot, kind, own, value)
                    yield from (replace(piece, kind=name) for piece in pieces)
                elif _has_first(segment.bucket, slot, own):
                    yield _whole_piece(segment.bucket, slot, name, torch.as_tensor(value).reshape(-1))


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
                "loaded. Give it such settings before tz.shard, SGD its momentum say, and turn them off after it "
                "until they are wanted; an optimizer of your own makes all of its states in its first step."
            )


def copied_pieces(
    saved: Iterable[SavedState], buckets: Sequence[Bucket], drivers: Sequence[OptimizerDriver]
) -> Iterator[tuple[tuple[str, ...], list[Piece]]]:
    """Mesh axes along which ranks hold copies of states, and all that this rank holds of these states.

    Args:
        buckets: of which optimizers keep states.
    """
    copied: dict[tuple[str, ...], list[Piece]] = {}
    for each in (each for each in saved if each.copied_along):
        copied.setdefault(each.copied_along, []).extend(state_pieces(each, each.state.range))
    stepped: dict[tuple[str, ...], list[Bucket]] = {}
    for bucket in buckets:
        stepped.setdefault(copied_along(bucket), []).append(bucket)
    for along, own in stepped.items():
        for driver in drivers if along else ():
            copied.setdefault(along, []).extend(optimizer_pieces(driver, functools.partial(_held_among, own)))
    yield from copied.items()


def held_pieces(buckets: Sequence[Bucket], drivers: Sequence[OptimizerDriver]) -> Iterator[Piece]:
    """Yield all that this rank holds of these buckets' weights, master weights where there are any, and moments."""
    for weights in saved_weights(buckets):
        yield from state_pieces(weights, weights.state.range)
    for driver in drivers:
        yield from optimizer_pieces(driver, functools.partial(_held_among, buckets))


def _held_among(own: Sequence[Bucket], bucket: Bucket) -> Range:
    """Range that this rank holds of a bucket's moments, whoever else holds it too; empty for one not in `own`."""
    return bucket.space.range(bucket.spec.optim_axes) if bucket in own else Range(0, 0)


def _pieces_of_resting(bucket: Bucket, slot: Slot, kind: str, elements: Range, state: Resting) -> Iterator[Piece]:
    def read(part: Range) -> Tensor:
        with state.opened(Range(elements.start + part.start, elements.start + part.stop)) as data:
            return data

    yield from _pieces_of_parameter(bucket, slot, kind, elements, state.dtype, read)


def _pieces_of_moment(segment: Segment, slot: Slot, kind: str, elements: Range, value: Tensor) -> Iterator[Piece]:
    """Yield one state that the optimizer keeps for each element; `value` is a stand-in where it is in files."""
    if value.is_meta:
        yield from _pieces_of_resting(segment.bucket, slot, kind, elements, segment.bucket.moments[kind])
        return
    part = value[elements.within(segment.range)]
    yield from _pieces_of_parameter(
        segment.bucket, slot, kind, elements, value.dtype, lambda own: part[own.start : own.stop]
    )


def _pieces_of_parameter(
    bucket: Bucket, slot: Slot, kind: str, own: Range, dtype: torch.dtype, read: Callable[[Range], Tensor]
) -> Iterator[Piece]:
    """Yield the elements `own`, parts of which `read` gives, as pieces of the whole parameter."""
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


def _whole_piece(bucket: Bucket, slot: Slot, kind: str, value: Tensor) -> Piece:
    """Make the piece of a state that is not per element."""
    shape, numel = bucket.box(slot).shape, value.numel()
    tile = whole(shape if math.prod(shape) == numel else (numel,))
    return Piece(slot.name, kind, 0, numel, shape, numel, tile, value.dtype, lambda: value)
