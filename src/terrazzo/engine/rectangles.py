"""Rectangular parts of tensors: the flat ranges that they are made of and make, and whether some are the whole tensor.

Integers only. A part of a tensor is a rectangle where it is cut along its dims, and a flat, row-major range where it is
cut without regard to them. A checkpoint has both, and so has a rank under tensor parallelism, which owns flat ranges of
rectangles.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from terrazzo.engine.layout import Range

__all__ = ["Rectangle", "Runs", "rectangles_of", "tiling_problem", "whole"]

_MAX_CORNERS, _MAX_COMPARED = 16, 4096


@dataclass(frozen=True)
class Rectangle:
    """In each dim `sizes[dim]` indices from `offsets[dim]` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """In each dim the first index behind it."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Of the whole tensor."""
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
        """The same with offsets that count from those of `outer`."""
        offsets = tuple(mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True))
        return Rectangle(offsets, self.sizes)

    def placed_in(self, outer: Rectangle) -> Rectangle:
        """Of one whose offsets count from those of `outer`, the same with offsets that count from 0."""
        return Rectangle(tuple(map(sum, zip(self.offsets, outer.offsets, strict=True))), self.sizes)

    def __str__(self) -> str:
        return f"{list(self.sizes)} at {list(self.offsets)}"


def whole(shape: Sequence[int]) -> Rectangle:
    """All of a tensor."""
    return Rectangle((0,) * len(shape), tuple(shape))


def rectangles_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """The flat range `start..stop` of a row-major tensor as rectangles, in its order; of d dims at most 2d - 1."""
    if start >= stop:
        return
    if not shape:
        yield Rectangle((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the rows that are there in full
    if first > last:
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Rectangle((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Rectangle]:
    before = index * math.prod(shape[1:])
    for rectangle in rectangles_of(shape[1:], start - before, stop - before):
        yield Rectangle((index, *rectangle.offsets), (1, *rectangle.sizes))


class Runs:
    """The flat, row-major ranges that make up a rectangle of a tensor: as few as there are, ascending, of equal length.

    They are counted and computed, not listed: a rectangle of columns has one for each row.

    Attributes:
        count: how many they are.
        length: elements of each.
    """

    def __init__(self, shape: tuple[int, ...], rectangle: Rectangle) -> None:
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        outer = len(shape)
        while outer > 1 and rectangle.sizes[outer - 1] == shape[outer - 1]:
            outer -= 1
        outer = max(outer - 1, 0)  # the dims before this one are walked through, the others lie in one piece
        self.length = math.prod(rectangle.sizes[outer:]) if rectangle.numel else 0
        self.count = math.prod(rectangle.sizes[:outer]) if rectangle.numel else 0
        self._sizes, self._strides = rectangle.sizes[:outer], strides[:outer]
        self._first = sum(offset * stride for offset, stride in zip(rectangle.offsets, strides, strict=True))

    @classmethod
    def of_range(cls, start: int, stop: int) -> Runs:
        """A single one."""
        return cls((stop,), Rectangle((start,), (stop - start,)))

    @property
    def numel(self) -> int:
        return self.count * self.length

    def start(self, number: int) -> int:
        """Where a run begins."""
        start = self._first
        for size, stride in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            number, index = divmod(number, size)
            start += index * stride
        return start

    def inside(self, outer: Range) -> Iterator[tuple[int, Range]]:
        """What of them lies in `outer`: each part as a range, and how many elements of all runs come before it."""
        numbers = range(self.count)
        first = bisect.bisect_right(numbers, outer.start - self.length, key=self.start)
        for number in numbers[first:]:
            start = self.start(number)
            if start >= outer.stop:
                return
            part = Range(start, start + self.length).intersect(outer)
            yield number * self.length + part.start - start, part

    def groups(self, outer: Range, gap: int) -> Iterator[list[tuple[int, Range]]]:
        """What `inside` gives, in lists of those with at most `gap` elements between one and the next."""
        group: list[tuple[int, Range]] = []
        for each in self.inside(outer):
            if group and each[1].start - group[-1][1].stop > gap:
                yield group
                group = []
            group.append(each)
        if group:
            yield group


def tiling_problem(shape: tuple[int, ...], rectangles: Sequence[Rectangle]) -> str | None:
    """Why `rectangles` are not the tensor, each element once; None where they are. Empty ones count for nothing."""
    full, rectangles = whole(shape), [rectangle for rectangle in rectangles if rectangle.numel]
    for rectangle in rectangles:
        if len(rectangle.offsets) != len(shape) or full.intersect(rectangle) != rectangle:
            return f"the part {rectangle} is not inside the shape {list(shape)}"
    cut = [dim for dim, size in enumerate(shape) if any(rectangle.sizes[dim] != size for rectangle in rectangles)]
    if 1 << len(cut) <= _MAX_CORNERS and _corners(rectangles, cut) == _corners([full] if full.numel else [], cut):
        return None
    if len(rectangles) > _MAX_COMPARED:
        return f"its {len(rectangles)} parts are not each of its elements once"
    if (pair := _overlapping(rectangles)) is not None:
        return f"the parts {pair[0]} and {pair[1]} overlap"
    if (numel := sum(rectangle.numel for rectangle in rectangles)) != full.numel:
        return f"its parts hold {numel} of {full.numel} elements"
    return None


def _corners(rectangles: Sequence[Rectangle], dims: Sequence[int]) -> dict[tuple[int, ...], int]:
    """The corners that `rectangles` have together along `dims`, each signed by how many of its places are ends.

    They are the mixed difference of how often each element is covered, and so equal where, and only where, that is.
    """
    found: Counter[tuple[int, ...]] = Counter()
    for rectangle in rectangles:
        edges = [((rectangle.offsets[dim], 1), (rectangle.offsets[dim] + rectangle.sizes[dim], -1)) for dim in dims]
        for corner in product(*edges):
            found[tuple(place for place, _ in corner)] += math.prod(sign for _, sign in corner)
    return {corner: count for corner, count in found.items() if count}


def _overlapping(rectangles: Sequence[Rectangle]) -> tuple[Rectangle, Rectangle] | None:
    """A sweep along the dim with the most different offsets: only rectangles that reach that far are compared."""
    dims = range(len(rectangles[0].offsets) if rectangles else 0)
    dim = max(dims, key=lambda dim: len({rectangle.offsets[dim] for rectangle in rectangles}), default=None)
    if dim is None:
        return (rectangles[0], rectangles[1]) if len(rectangles) > 1 else None
    reaching: list[Rectangle] = []
    for rectangle in sorted(rectangles, key=lambda rectangle: rectangle.offsets[dim]):
        reaching = [other for other in reaching if other.ends[dim] > rectangle.offsets[dim]]
        if (other := next((other for other in reaching if other.intersect(rectangle)), None)) is not None:
            return other, rectangle
        reaching.append(rectangle)
    return None
