"""What a rank has of a parameter that several axes of the mesh share, and over which of them its gradient is summed.

Beside the data axes, along which ranks hold the same parameters, a mesh may have axes along which each rank holds a
part of a matrix as a plain tensor of its own. `terrazzo.parallel` cuts the parameters and leaves a `Record` of each on
the modules that hold it; the engine reads it. Integers only: no communication.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Box", "Family", "Record", "Rectangle", "leave_record", "record_of"]


class Family(enum.StrEnum):
    """Parameters whose gradients are summed over the same axes. One flat space holds those of one family alone."""

    DENSE = "dense"
    SHARED = "shared"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes beside the data axes over which its gradients are summed."""
        return _SUMS[self]


_SUMS: dict[Family, tuple[str, ...]] = {Family.DENSE: (), Family.SHARED: ("tp",)}


@dataclass(frozen=True)
class Rectangle:
    """A part of a tensor: `sizes[dim]` elements from `offsets[dim]` on in each of its dims."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class Box:
    """What a rank has of a parameter: rectangles of it, joined along one dim.

    Attributes:
        shape: of the whole parameter.
        rectangles: disjoint; their sizes are equal but for `dim`. Several where matrices are fused, such as a gate and
            an up projection of which each rank has a part of either.
        dim: along which they are joined.
    """

    shape: tuple[int, ...]
    rectangles: tuple[Rectangle, ...]
    dim: int = 0

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> Box:
        """The whole parameter."""
        return cls(tuple(shape), (Rectangle((0,) * len(shape), tuple(shape)),))

    @classmethod
    def cut(cls, shape: Sequence[int], dim: int, runs: Iterable[tuple[int, int]]) -> Box:
        """The half-open intervals `runs` of one dim, and all of the others."""
        rectangles = []
        for start, stop in runs:
            offsets = tuple(start if each == dim else 0 for each in range(len(shape)))
            sizes = tuple(stop - start if each == dim else size for each, size in enumerate(shape))
            rectangles.append(Rectangle(offsets, sizes))
        return cls(tuple(shape), tuple(rectangles), dim)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what the rank has."""
        joined = sum(each.sizes[self.dim] for each in self.rectangles) if self.shape else 0
        return tuple(joined if dim == self.dim else size for dim, size in enumerate(self.rectangles[0].sizes))

    @property
    def is_all(self) -> bool:
        return math.prod(self.local_shape) == math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """What the rank has of `whole`, in memory of its own, contiguous."""
        parts = [whole[each.slices] for each in self.rectangles]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Record:
    """What the engine has to know of one parameter.

    Attributes:
        box: this rank's part of it.
        alike: each rank of the family's axes computes the same whole gradient, of which only the first one's may count.
    """

    family: Family
    box: Box
    alike: bool = False


_RECORDS = "terrazzo_records"


def leave_record(module: nn.Module, attribute: str, record: Record) -> None:
    """Note what this rank has of a parameter of `module`. It stays when the module is copied, or the parameter cast."""
    vars(module).setdefault(_RECORDS, {})[attribute] = record


def record_of(module: nn.Module, attribute: str) -> Record | None:
    """The record of a parameter of `module`; None where it is an ordinary one."""
    found: Record | None = vars(module).get(_RECORDS, {}).get(attribute)
    return found
