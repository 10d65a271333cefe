"""Rectangular parts of tensors, and the rectangles that a flat range is made of.

Integers only. A part of a tensor is a rectangle where it is cut along its dims, and a flat, row-major range where it is
cut without regard to them. A checkpoint has both, and so has a rank under tensor parallelism, which owns flat ranges of
rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Rectangle", "rectangles_of", "whole"]


@dataclass(frozen=True)
class Rectangle:
    """Part of a tensor that has, in each dim, `sizes[dim]` indices from `offsets[dim]` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """First index after it in each dim."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this rectangle in the whole tensor."""
        return tuple(map(slice, self.offsets, self.ends))

    def intersect(self, other: Rectangle) -> Rectangle | None:
        """The common part, or None when there is none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(end - offset for offset, end in zip(offsets, map(min, self.ends, other.ends), strict=True))
        return Rectangle(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Rectangle) -> tuple[slice, ...]:
        """This rectangle as an index of a tensor that holds `outer`."""
        return self.relative_to(outer).slices

    def relative_to(self, outer: Rectangle) -> Rectangle:
        """This rectangle with offsets that count from those of `outer`."""
        offsets = tuple(mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True))
        return Rectangle(offsets, self.sizes)

    def placed_in(self, outer: Rectangle) -> Rectangle:
        """This rectangle, whose offsets count from those of `outer`, with offsets that count from 0."""
        return Rectangle(tuple(map(sum, zip(self.offsets, outer.offsets, strict=True))), self.sizes)

    def __str__(self) -> str:
        return f"{list(self.sizes)} at {list(self.offsets)}"


def whole(shape: Sequence[int]) -> Rectangle:
    """Rectangle that is all of a tensor of that shape."""
    return Rectangle((0,) * len(shape), tuple(shape))


def rectangles_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """The flat range `start..stop` of a row-major tensor as rectangles, in its order; of d dims at most 2d - 1."""
    if start >= stop:
        return
    if not shape:
        yield Rectangle((), ())
        return
    row = math.prod(shape[1:])
    full = range(-(-start // row), stop // row)  # the rows that are there in full
    if full.start > full.stop:
        yield from _in_row(shape, full.stop, start, stop)
        return
    yield from _in_row(shape, full.start - 1, start, full.start * row)
    if full:
        yield Rectangle((full.start, *(0 for _ in shape[1:])), (len(full), *shape[1:]))
    yield from _in_row(shape, full.stop, full.stop * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Rectangle]:
    before = index * math.prod(shape[1:])
    for rectangle in rectangles_of(shape[1:], start - before, stop - before):
        yield Rectangle((index, *rectangle.offsets), (1, *rectangle.sizes))
