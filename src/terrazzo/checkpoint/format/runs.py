"""A rectangle of a tensor as the flat, row-major ranges in which it lies in a file. Integers only."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator

from terrazzo.engine.partition.rectangles import Rectangle
from terrazzo.engine.plan.layout import Range

__all__ = ["Runs"]


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
