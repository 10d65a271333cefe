"""Which members of a bucket are in one param group, and what a rank holds of them: sizes and coordinates, no tensors.

The engine's `Bucket` is a `GroupedBucket`, and so is the planner's `SizedBucket`, which is made of shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from terrazzo.engine.partition.box import Box
from terrazzo.engine.plan.layout import Range, Slot
from terrazzo.engine.plan.precision import Precision

__all__ = ["GroupedAxis", "GroupedBucket", "held_range", "runs"]


class GroupedMember(Protocol):
    """A parameter of such a bucket.

    Attributes:
        group: number of its param group.
        boxes: what each rank along `tp` has of a matrix, where they have parts.
    """

    @property
    def group(self) -> int: ...
    @property
    def boxes(self) -> tuple[Box, ...]: ...


class GroupedAxis(Protocol):
    """An axis of ranks over which gradients are summed."""

    @property
    def size(self) -> int: ...


class GroupedBucketSpec(Protocol):
    """Description of such a bucket, with attributes of `BucketSpec`."""

    @property
    def precision(self) -> Precision: ...
    @property
    def updated_off_device(self) -> bool: ...
    @property
    def optim_axes(self) -> tuple[str, ...]: ...
    @property
    def ranks(self) -> Mapping[str, GroupedAxis]: ...
    @property
    def full_numel(self) -> int: ...


class GroupedBucket(Protocol):
    """A bucket whose members have param groups, as one rank has it, with attributes of `Bucket`.

    Buckets are told apart by identity: equal units have buckets of their own.
    """

    @property
    def spec(self) -> GroupedBucketSpec: ...
    @property
    def slots(self) -> Sequence[Slot]: ...
    @property
    def members(self) -> Sequence[GroupedMember]: ...

    def coordinate(self, axis: str) -> tuple[int, int]:
        """This rank's index along an axis, and how many there are."""

    def part(self, axes: tuple[str, ...]) -> Range:
        """This rank's range of the flat space when that is split over `axes`."""


def runs(bucket: GroupedBucket) -> Iterator[tuple[int, int]]:
    """Each run of members that have one param group: `start` and `stop` of `bucket.members[start:stop]`."""
    start = 0
    for _, members in itertools.groupby(bucket.members, key=lambda member: member.group):
        stop = start + len(list(members))
        yield start, stop
        start = stop


def held_range(bucket: GroupedBucket, start: int, stop: int) -> Range:
    """The range that this rank holds of `bucket.members[start:stop]`, padding included."""
    run = Range(bucket.slots[start].offset, bucket.slots[stop - 1].padded.stop)
    return bucket.part(bucket.spec.optim_axes).intersect(run)
