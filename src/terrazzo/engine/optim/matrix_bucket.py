"""What updates of matrices ask of a bucket to know what goes where: sizes and coordinates, and no tensors.

The engine's `Bucket` has it, and so has the planner's `SizedBucket`, which is made of shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from terrazzo.engine.plan.box import Box
from terrazzo.engine.plan.layout import Range, Slot
from terrazzo.engine.plan.precision import Precision

__all__ = ["MatrixAxis", "MatrixBucket"]


class MatrixMember(Protocol):
    """A parameter.

    Attributes:
        group: number of its param group.
        boxes: what each rank along `tp` has of a matrix, where they have parts.
    """

    @property
    def group(self) -> int: ...
    @property
    def boxes(self) -> tuple[Box, ...]: ...


class MatrixAxis(Protocol):
    """An axis of ranks over which gradients are summed."""

    @property
    def size(self) -> int: ...


class MatrixBucket(Protocol):
    """A bucket as one rank has it. Attributes are those of `BucketSpec`, `Bucket` and `Layout`.

    Buckets are told apart by identity: equal units have buckets of their own.
    """

    @property
    def precision(self) -> Precision: ...
    @property
    def updated_off_device(self) -> bool: ...
    @property
    def optim_axes(self) -> tuple[str, ...]: ...
    @property
    def ranks(self) -> Mapping[str, MatrixAxis]: ...
    @property
    def whole(self) -> int: ...
    @property
    def slots(self) -> Sequence[Slot]: ...
    @property
    def members(self) -> Sequence[MatrixMember]: ...

    def coordinate(self, axis: str) -> tuple[int, int]:
        """This rank's index along an axis, and how many there are."""

    def part(self, axes: tuple[str, ...]) -> Range:
        """What this rank has of the flat space when it is split over `axes`."""
