"""Blocks of N-D index spaces: which of them a flat range is made of, and whether some of them tile a whole tensor.

Integers only. Sharded formats keep a tensor as blocks, and readers ask for flat, row-major ranges of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Box", "boxes_of", "tiling_problem", "whole"]


@dataclass(frozen=True)
class Box:
    """In each dim `sizes[dim]` indices from `offsets[dim]` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when there is none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """This box as an index of a tensor that holds `outer`."""
        starts = [mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def _ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The flat range `start..stop` of a row-major tensor as boxes, in its order; at most two for each dim."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the rows that are there in full
    if first > last:
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    before = index * math.prod(shape[1:])
    for box in boxes_of(shape[1:], start - before, stop - before):
        yield Box((index, *box.offsets), (1, *box.sizes))


def tiling_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` are not the tensor, each element once; None where they are. Empty boxes count for nothing."""
    full, boxes = whole(shape), [box for box in boxes if box.numel]
    for box in boxes:
        if len(box.offsets) != len(shape) or full.intersect(box) != box:
            return f"the part {_shown(box)} is not inside the shape {list(shape)}"
    if (pair := _overlapping(boxes)) is not None:
        return f"the parts {_shown(pair[0])} and {_shown(pair[1])} overlap"
    if (numel := sum(box.numel for box in boxes)) != full.numel:
        return f"its parts hold {numel} of {full.numel} elements"
    return None


def _overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """A sweep along the dim with the most different offsets: only boxes that reach that far are compared."""
    dims = range(len(boxes[0].offsets) if boxes else 0)
    dim = max(dims, key=lambda dim: len({box.offsets[dim] for box in boxes}), default=None)
    if dim is None:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    reaching: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        reaching = [other for other in reaching if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        if (other := next((other for other in reaching if other.intersect(box)), None)) is not None:
            return other, box
        reaching.append(box)
    return None


def _shown(box: Box) -> str:
    return f"{list(box.sizes)} at {list(box.offsets)}"
