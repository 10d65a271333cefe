"""The part of a parameter that this rank holds where ranks along `tp` or `ep` divide it.

Along these axes each rank holds its part as a plain tensor of its own. `terrazzo.parallel` cuts the parameters and
leaves a `Record` of each on the modules that hold it; the engine reads the record. Integers only: no communication.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from terrazzo.engine.mesh.family import Family
from terrazzo.engine.partition.rectangles import Rectangle, rectangles_of, whole
from terrazzo.engine.plan.layout import Range
from terrazzo.marks import Mark

__all__ = [
    "Box",
    "Owned",
    "Record",
    "leave_record",
    "record_of",
]


@dataclass(frozen=True)
class Box:
    """A rank's part of a parameter: rectangles of it, joined along one dim.

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
        return cls(tuple(shape), (whole(shape),))

    @classmethod
    def cut(cls, shape: Sequence[int], dim: int, intervals: Iterable[tuple[int, int]]) -> Box:
        """The half-open `intervals` of one dim, and all of the others."""
        rectangles = []
        for start, stop in intervals:
            offsets = tuple(start if each == dim else 0 for each in range(len(shape)))
            sizes = tuple(stop - start if each == dim else size for each, size in enumerate(shape))
            rectangles.append(Rectangle(offsets, sizes))
        return cls(tuple(shape), tuple(rectangles), dim)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the rank's part."""
        joined = sum(each.sizes[self.dim] for each in self.rectangles) if self.shape else 0
        return tuple(joined if dim == self.dim else size for dim, size in enumerate(self.rectangles[0].sizes))

    @property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def is_all(self) -> bool:
        return self.local_numel == math.prod(self.shape)

    def owned(self, wanted: Range) -> Iterator[Owned]:
        """Yield where the flat elements `wanted` of the rank's part lie in the whole parameter, in their order."""
        before, leading = 0, math.prod(self.local_shape[: self.dim])
        if len(self.rectangles) == 1 or leading == 1:  # one after the other in memory too
            for each in self.rectangles:
                here = wanted.intersect(Range(before, before + each.numel))
                if here.numel:
                    elements = Range(here.start - before, here.stop - before)
                    yield Owned(each, elements, here.from_start_of(wanted), (here.numel,), (slice(0, here.numel),))
                before += each.numel
            return
        local_parts = self.local_rectangles()
        for part in rectangles_of(self.local_shape, wanted.start, wanted.stop):
            for each, local in zip(self.rectangles, local_parts, strict=True):
                if (common := local.intersect(part)) is not None:
                    tile = common.relative_to(local).placed_in(each)
                    inside = Range(before, before + part.numel)
                    yield Owned(tile, Range(0, tile.numel), inside, part.sizes, common.relative_to(part).slices)
            before += part.numel

    def elements(self, wanted: Range, device: torch.device) -> Tensor:
        """Numbers in the whole parameter, flat and row-major, of the flat elements `wanted` of the rank's part.

        Returns:
            int64, 1-D.
        """
        flat = torch.arange(wanted.start, wanted.stop, device=device)
        if self.is_all:
            return flat
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        begins = []  # where in the whole each index of the joined dim begins
        for each in self.rectangles:
            start = sum(map(operator.mul, strides, each.offsets))
            begins.append(start + strides[self.dim] * torch.arange(each.sizes[self.dim], device=device))
        joined, positions = torch.cat(begins), torch.zeros_like(flat)
        for dim in reversed(range(len(self.shape))):
            index = flat % self.local_shape[dim]
            positions += joined[index] if dim == self.dim else strides[dim] * index
            flat = flat // self.local_shape[dim]
        return positions

    def local_rectangles(self) -> list[Rectangle]:
        """The rectangles in the order of `rectangles`, as parts of the rank's part."""
        rectangles, start = [], 0
        for each in self.rectangles:
            offsets = tuple(start if dim == self.dim else 0 for dim in range(len(self.shape)))
            rectangles.append(Rectangle(offsets, each.sizes))
            start += each.sizes[self.dim]
        return rectangles

    def of(self, full: Tensor) -> Tensor:
        """Return the rank's part of `full`, in memory of its own, contiguous."""
        parts = [full[each.slices] for each in self.rectangles]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def put(self, part: Tensor, full: Tensor) -> None:
        """Copy the rank's `part` to where it belongs in `full`; the reverse of `of`."""
        for local, each in zip(self.local_rectangles(), self.rectangles, strict=True):
            full[each.slices] = part[local.slices]


@dataclass(frozen=True)
class Owned:
    """Elements of a parameter that a rank has.

    Attributes:
        tile: a rectangle of the whole parameter.
        elements: which of it they are, flat and row-major.
        inside: where they are in the flat range that was asked for.
    """

    tile: Rectangle
    elements: Range
    inside: Range
    _sizes: tuple[int, ...]
    _index: tuple[slice, ...]

    def of(self, data: Tensor) -> Tensor:
        """Return a view of these elements in `data`: 1-D, or of the tile's sizes.

        Args:
            data: the flat elements at `inside`, which may hold others too.
        """
        return data.view(self._sizes)[self._index]

    def rectangles(self) -> Iterator[Rectangle]:
        """Yield these elements as rectangles of the whole parameter, in their order."""
        inner = rectangles_of(self.tile.sizes, self.elements.start, self.elements.stop)
        yield from (each.placed_in(self.tile) for each in inner)


@dataclass(frozen=True)
class Record:
    """Facts about one parameter that the engine has to know.

    Attributes:
        box: this rank's part of it.
        replicated: each rank of the family's axes computes the same whole gradient, of which only the first one's may
            count.
        boxes: the parts of all ranks along `tp`, in their order, where these differ.
    """

    family: Family
    box: Box
    replicated: bool = False
    boxes: tuple[Box, ...] = ()


_RECORDS = Mark[dict[str, Record]]("terrazzo_records")


def leave_record(module: nn.Module, attribute: str, record: Record) -> None:
    """Note what this rank has of a parameter of `module`. It stays when the module is copied, or the parameter cast."""
    _RECORDS.leave(module, {**(_RECORDS.find(module) or {}), attribute: record})


def record_of(module: nn.Module, attribute: str) -> Record | None:
    """The record of a parameter of `module`; None where it is an ordinary one."""
    return (_RECORDS.find(module) or {}).get(attribute)
