"""One rank's range of a state, and the moves between places: gather, reduce, narrow and cast.

Ranges nest (see `layout`), so each move is one contiguous collective per mesh axis that it adds or removes, straight
between the memory it comes from and the memory it ends in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.engine.axes import Axes
from terrazzo.engine.collectives import divide
from terrazzo.engine.layout import Layout, Range, share
from terrazzo.engine.pages import use_large_pages
from terrazzo.engine.transfer import Moves

__all__ = ["Buffer", "Space"]


@dataclass(frozen=True)
class Space:
    """A flat index space laid over the data axes of a mesh."""

    layout: Layout
    axes: Axes

    def range(self, axes: tuple[str, ...]) -> Range:
        """This rank's part of the space when it is split over `axes`."""
        return share(self.layout.whole, self.axes.cuts(axes))

    def empty(self, axes: tuple[str, ...], dtype: torch.dtype) -> Buffer:
        """Uninitialised memory for this rank's part."""
        data = torch.empty(self.range(axes).numel, dtype=dtype, device=self.axes.device)
        return Buffer(self, axes, use_large_pages(data))

    def zeros(self, axes: tuple[str, ...], dtype: torch.dtype) -> Buffer:
        buffer = self.empty(axes, dtype)
        buffer.data.zero_()
        return buffer


@dataclass
class Buffer:
    """The elements of `space.range(axes)`, in `data` (1-D)."""

    space: Space
    axes: tuple[str, ...]
    data: Tensor

    @property
    def range(self) -> Range:
        return self.space.range(self.axes)

    def narrow(self, axes: tuple[str, ...]) -> Buffer:
        """The part of this buffer that splitting over the longer list `axes` leaves; shares its memory."""
        return Buffer(self.space, axes, self.data[self.space.range(axes).within(self.range)])

    def part(self, wanted: Range) -> Tensor:
        """The elements of `wanted` that this buffer holds, as a view."""
        return self.data[self.range.intersect(wanted).within(self.range)]

    def gather(self, source: Buffer) -> Moves:
        """Fill this buffer from `source`, which is split over more axes: cast, then one all-gather per axis."""
        own = self.narrow(source.axes).data
        if own.data_ptr() != source.data.data_ptr():
            own.copy_(source.data)
        axes = source.axes
        while len(axes) > len(self.axes):
            axis, axes = axes[-1], axes[:-1]
            if self.space.axes.along(axis).size > 1:
                yield from self.space.axes.along(axis).all_gather(self.narrow(axes).data)
        return self.data

    def reduce(self, axes: tuple[str, ...], wire: torch.dtype, dtype: torch.dtype) -> Moves:
        """Sum over the ranks of each further axis in `axes`, keeping this rank's part: one reduce-scatter per axis.

        Args:
            axes: a list that this buffer's axes are a prefix of.
            wire: dtype sent.
            dtype: dtype of the sum; where there is nothing to sum, the data are returned as they are.
        """
        data = self.data
        for axis in self.space.axes.live(axes[len(self.axes) :]):
            data = yield from self.space.axes.along(axis).reduce_scatter(data.to(wire), dtype)
        return data

    def average(self, axes: tuple[str, ...], wire: torch.dtype, dtype: torch.dtype, denominator: float) -> Moves:
        """Sum over the ranks of `axes`, which do not split this buffer, then divide once: one all-reduce per axis."""
        data, live = self.data, self.space.axes.live(axes)
        for axis in live:
            divisor = denominator if axis == live[-1] else 1
            data = yield from self.space.axes.along(axis).all_reduce(data.to(wire), dtype, divisor)
        return data.to(dtype) if live else divide(data.to(dtype), denominator)
