"""Which rank updates which matrix, and what goes where for that. Integers only.

A rank holds a range of each flat space, so parts of matrices. Before an update the parts of a matrix come together on
its owner, axis by axis of the mesh: ranges nest, so that what a rank has after each is one range again. What the owner
makes of it goes the same way back, and then to the ranks that hold the same. Of a matrix that ranks along `tp` have
parts of, each part comes together like a matrix, and then these do. Each matrix counts for what its update computes,
and goes to the rank that has least to do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from terrazzo.engine.optim.segments.group_runs import GroupedBucket
from terrazzo.engine.partition.box import Box
from terrazzo.engine.plan.layout import Range, share

__all__ = ["CUT", "AxisExchange", "Matrix", "MatrixPart", "Owners", "owners_of"]

CUT = "tp"
"""The axis along which ranks have parts of matrices."""


class Matrix(NamedTuple):
    """A matrix of a flat space: a parameter, or one of those that it is a stack of.

    Attributes:
        bucket, number: of the parameter, and its own among the members.
        range: of the space: all of it, or the part that ranks like this one along `tp` have.
        shape: of all of it.
        boxes: what each rank along `tp` has of it, where they have parts.
    """

    bucket: GroupedBucket
    number: int
    range: Range
    shape: tuple[int, int]
    boxes: tuple[Box, ...] = ()

    @property
    def whole(self) -> Range:
        """All of it where its owner has it: of the space, or by itself where ranks have parts."""
        return Range(0, math.prod(self.shape)) if self.boxes else self.range

    @property
    def work(self) -> int:
        """The work of its update, in proportion to FLOPs."""
        return max(self.shape) * min(self.shape) ** 2


class MatrixPart(NamedTuple):
    """Elements of a matrix, as a range of its space."""

    matrix: Matrix
    range: Range


class AxisExchange(NamedTuple):
    """An exchange along one axis: what this rank sends to each rank of it, and gets from each."""

    axis: str
    sent: Sequence[Sequence[MatrixPart]]
    received: Sequence[Sequence[MatrixPart]]


@dataclass(frozen=True, eq=False)
class Owners:
    """Matrices that are exchanged at once, of buckets that are split alike, and the owner of each.

    Args:
        coordinates: by matrix the owner's index along each axis over which gradients are summed, and along `tp` where
            ranks have parts.

    Attributes:
        split: the axes over which their states are split.
        copies: the other axes over which gradients are summed, along which ranks hold the same.
    """

    coordinates: Mapping[Matrix, Mapping[str, int]]

    @property
    def matrices(self) -> Collection[Matrix]:
        return self.coordinates.keys()

    @cached_property
    def _first(self) -> Matrix:
        """Any of them, asked for what all have alike."""
        return next(iter(self.coordinates))

    @property
    def group(self) -> int:
        """Number of the param group of one of the matrices."""
        return self._first.bucket.members[self._first.number].group

    @property
    def split(self) -> tuple[str, ...]:
        return self._first.bucket.spec.optim_axes

    @cached_property
    def copies(self) -> tuple[str, ...]:
        return tuple(axis for axis in self._first.bucket.spec.ranks if axis not in self.split)

    @property
    def cut(self) -> tuple[str, ...]:
        """The axis along which ranks have parts of each, if there is one."""
        return (CUT,) if self._first.boxes else ()

    def is_here(self, matrix: Matrix) -> bool:
        """Whether this rank owns it."""
        return self.has_part(matrix) and self._at_owner(matrix, self.cut)

    def has_part(self, matrix: Matrix) -> bool:
        """Whether what ranks like this one along `tp` have of it comes together here."""
        return self._at_owner(matrix, (*self.split, *self.copies))

    def along(self, axis: str) -> tuple[int, int]:
        """This rank's index along an axis, and how many there are."""
        return self._first.bucket.coordinate(axis)

    def held(self, matrix: Matrix) -> Range:
        """The range of a matrix that this rank holds."""
        return matrix.range.intersect(matrix.bucket.part(self.split))

    def sends(self, matrix: Matrix) -> bool:
        """Whether the owner's update begins with what this rank holds: others may hold the same."""
        return self._at_owner(matrix, self.copies)

    def gathers(self, among: Collection[Matrix]) -> Iterator[AxisExchange]:
        """Bring the parts of `among`, the same on every rank, to the owners."""
        for depth in range(len(self.split), 0, -1):
            yield self._exchange(depth, among, gathers=True)

    def returns(self, among: Collection[Matrix]) -> Iterator[AxisExchange]:
        """Bring what the owners have back to all that hold elements of it."""
        for depth in range(1, len(self.split) + 1):
            yield self._exchange(depth, among, gathers=False)
        for number, axis in enumerate(self.copies):
            rank, size = self.along(axis)
            sent: list[list[MatrixPart]] = [[] for _ in range(size)]
            received: list[list[MatrixPart]] = [[] for _ in range(size)]
            for matrix in among:
                part = MatrixPart(matrix, self.held(matrix))
                if not (part.range.numel and self._at_owner(matrix, self.copies[number + 1 :])):
                    continue
                if (source := self.coordinates[matrix][axis]) != rank:
                    received[source].append(part)
                else:
                    for other in range(size):
                        sent[other].extend([part] if other != rank else ())
            yield AxisExchange(axis, sent, received)

    def _exchange(self, depth: int, among: Collection[Matrix], gathers: bool) -> AxisExchange:
        """Along the axis that cuts ranges at that depth."""
        axis, inner = self.split[depth - 1], self.split[depth:]
        rank, size = self.along(axis)
        outwards: list[list[MatrixPart]] = [[] for _ in range(size)]
        inwards: list[list[MatrixPart]] = [[] for _ in range(size)]
        for matrix in (each for each in among if self._at_owner(each, (*inner, *self.copies))):
            if (owner := self.coordinates[matrix][axis]) != rank:
                outwards[owner].extend(self._part(matrix, depth, rank))
            else:
                for other in range(size):
                    inwards[other].extend(self._part(matrix, depth, other) if other != rank else ())
        return AxisExchange(axis, outwards, inwards) if gathers else AxisExchange(axis, inwards, outwards)

    def _part(self, matrix: Matrix, depth: int, index: int) -> Iterator[MatrixPart]:
        """What a rank has of it that has `index` along the axis of that depth, and along outer ones here."""
        cuts = [self.along(axis) for axis in self.split[:depth]]
        cuts[-1] = (index, cuts[-1][1])
        held = share(Range(0, matrix.bucket.spec.full_numel), cuts).intersect(matrix.range)
        if held.numel:
            yield MatrixPart(matrix, held)

    def _at_owner(self, matrix: Matrix, axes: Sequence[str]) -> bool:
        """Whether this rank is where the owner is, along these axes."""
        return all(self.along(axis)[0] == self.coordinates[matrix][axis] for axis in axes)


def owners_of(buckets: Sequence[GroupedBucket], groups: Collection[int]) -> list[Owners]:
    """Give each matrix of the param groups `groups` an owner; the same on every rank.

    Exchanged at once are matrices of so many buckets in a row that each rank has one, if there are as many.
    """
    owners: list[Owners] = []
    alike: dict[tuple[object, ...], list[GroupedBucket]] = {}
    for bucket in buckets:
        alike.setdefault((bucket.spec.optim_axes, tuple(bucket.spec.ranks)), []).append(bucket)
    for among in alike.values():
        sizes = {axis: along.size for axis, along in among[0].spec.ranks.items()}
        load, batch = list[int](), list[Matrix]()
        for bucket in among:
            batch += _matrices(bucket, groups)
            if batch and not load:
                sizes |= {CUT: len(batch[0].boxes)} if batch[0].boxes else {}
                load = [0] * math.prod(sizes.values())
            if batch and (len(batch) >= len(load) or bucket is among[-1]):
                owners.append(_shared_out(batch, load, sizes))
                batch = []
    return owners


def _matrices(bucket: GroupedBucket, groups: Collection[int]) -> Iterator[Matrix]:
    for index, (slot, member) in enumerate(zip(bucket.slots, bucket.members, strict=True)):
        if member.group in groups and member.boxes:
            rows, columns = member.boxes[0].shape
            yield Matrix(bucket, index, slot.range, (rows, columns), member.boxes)
        elif member.group in groups and slot.numel:
            rows, columns = slot.shape[-2:]
            for start in range(slot.offset, slot.range.stop, rows * columns):
                yield Matrix(bucket, index, Range(start, start + rows * columns), (rows, columns))


def _shared_out(matrices: Sequence[Matrix], load: list[int], sizes: Mapping[str, int]) -> Owners:
    """The longest first, each to the rank with the least to do; `load` is what each has had, and is added to."""
    coordinates: dict[Matrix, Mapping[str, int]] = {}
    for matrix in sorted(matrices, key=lambda each: -each.work):
        owner = load.index(min(load))
        load[owner] += matrix.work
        coordinate = {}
        for axis, size in sizes.items():
            owner, coordinate[axis] = divmod(owner, size)
        coordinates[matrix] = coordinate
    return Owners({matrix: coordinates[matrix] for matrix in matrices})
