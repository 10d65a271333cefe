"""One rank's range of a state, and the moves between places: gather, narrow and cast.

Ranges nest (see `layout`), so each move is one contiguous collective per mesh axis that it adds or removes, straight
between the memory it comes from and the memory it ends in. A state may also rest where no tensor can point to it, in a
file; `Resting` is what can be asked of a state wherever it lies, and `StateStore` gives it a place.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from terrazzo.engine.comm.transfer import Moves
from terrazzo.engine.formats.block_format import BlockFormat
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.plan.layout import Layout, Range, Slot, share
from terrazzo.engine.runtime.pages import use_large_pages
from terrazzo.engine.runtime.worker import Job

__all__ = ["Access", "AsSeen", "Buffer", "Resting", "Space", "StateStore", "copy_changed", "differ", "view"]

Access = Literal["read", "change", "replace"]
"""Use of opened elements: they are read; read and written; all written, whatever they were before."""


@dataclass(frozen=True)
class Space:
    """A flat index space laid over the data axes of a mesh.

    Attributes:
        window: the part of this rank's that a state has, where it does not have all.
    """

    layout: Layout
    axes: Axes
    window: Range | None = None
    _ranges: dict[tuple[str, ...], Range] = field(default_factory=dict, repr=False, compare=False)

    def range(self, axes: tuple[str, ...]) -> Range:
        """Part of the space that this rank has when it is split over `axes`."""
        if (known := self._ranges.get(axes)) is None:
            known = share(self.layout.whole, self.axes.coordinates(axes))
            known = self._ranges[axes] = known if self.window is None else known.intersect(self.window)
        return known

    def windowed(self, window: Range) -> Space:
        """Space for a state that has no elements outside of `window`."""
        return Space(self.layout, self.axes, window)

    def empty(self, axes: tuple[str, ...], dtype: torch.dtype) -> Buffer:
        """Allocate device memory for this rank's part, uninitialised."""
        data = torch.empty(self.range(axes).numel, dtype=dtype, device=self.axes.device)
        return Buffer(self, axes, use_large_pages(data))

    def as_bytes(self, blocks: BlockFormat) -> Space:
        """Space of the bytes of its blocks, where a state is kept in fewer bits than any dtype has."""
        return Space(self.layout.as_bytes(blocks), self.axes)

    def zeros(self, axes: tuple[str, ...], dtype: torch.dtype) -> Buffer:
        """Allocate device memory for this rank's part, zero."""
        buffer = self.empty(axes, dtype)
        buffer.data.zero_()
        return buffer


class Resting(ABC):
    """The elements of `space.range(axes)` of one state, at rest on some tier."""

    space: Space
    axes: tuple[str, ...]

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    def range(self) -> Range:
        return self.space.range(self.axes)

    @property
    def nbytes(self) -> int:
        return self.range.numel * self.dtype.itemsize

    @abstractmethod
    def cuts(self, wanted: Range) -> Iterator[Range]:
        """Yield what is held of `wanted`, in parts that need little memory when they are opened one after the other."""

    @abstractmethod
    def opened(self, wanted: Range, access: Access = "read") -> contextlib.AbstractContextManager[Tensor]:
        """Have what is held of `wanted` in memory, 1-D; what is written into it is kept if `access` says so."""

    def load(self, into: Tensor) -> Moves[None]:
        """Copy all of it into a tensor of any dtype in the device's memory."""
        yield from ()
        for part in self.cuts(self.range):
            with self.opened(part) as data:
                into[part.within(self.range)].copy_(data)

    def copied(self, wanted: Range, device: torch.device) -> Tensor:
        """Copy what is held of `wanted`, 1-D, to memory of its own on `device`."""
        own = self.range.intersect(wanted)
        data = torch.empty(own.numel, dtype=self.dtype, device=device)
        for cut in self.cuts(own):
            with self.opened(cut) as part:
                data[cut.within(own)] = part.detach()
        return data

    def save(self, source: Buffer) -> None:
        """Replace what is held by what `source` holds of it; blocks."""
        for part in self.cuts(self.range):
            with self.opened(part, "replace") as data:
                data.copy_(source.part(part))


@dataclass(eq=False)
class Buffer(Resting):
    """The elements of `space.range(axes)`, in `data` (1-D), in the memory of the device or of the host."""

    space: Space
    axes: tuple[str, ...]
    data: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def narrow(self, axes: tuple[str, ...]) -> Buffer:
        """View of the part of this buffer that splitting over the longer list `axes` leaves."""
        return Buffer(self.space, axes, self.data[self.space.range(axes).within(self.range)])

    def part(self, wanted: Range) -> Tensor:
        """View of the elements of `wanted` that this buffer holds."""
        return self.data[self.range.intersect(wanted).within(self.range)]

    def cuts(self, wanted: Range) -> Iterator[Range]:
        part = self.range.intersect(wanted)
        if part.numel:
            yield part

    @contextlib.contextmanager
    def opened(self, wanted: Range, access: Access = "read") -> Iterator[Tensor]:
        yield self.part(wanted)

    def load(self, into: Tensor) -> Moves[None]:
        yield from ()
        into.copy_(self.data, non_blocking=True)

    def gather(self, source: Resting) -> Moves[Tensor]:
        """Fill this buffer from `source`, which is split over more axes: cast, then one all-gather per axis."""
        yield from self.fill_own(source)
        return (yield from self.complete(source.axes))

    def fill_own(self, source: Resting) -> Moves[None]:
        """Fill this rank's part from `source`, which is split over more axes; nothing to do where they are one."""
        own = self.narrow(source.axes).data
        if not (isinstance(source, Buffer) and source.data.data_ptr() == own.data_ptr()):
            yield from source.load(own)

    def complete(self, axes: tuple[str, ...]) -> Moves[Tensor]:
        """Fill this buffer from the parts that splitting over the longer list `axes` leaves on each rank."""
        while len(axes) > len(self.axes):
            axis, axes = axes[-1], axes[:-1]
            if self.space.axes.along(axis).size > 1:
                yield from self.space.axes.along(axis).all_gather(self.narrow(axes).data)
        return self.data


class StateStore(Protocol):
    """Places for a bucket's states on every tier: `Store`, in a model that runs."""

    def state(self, space: Space, axes: tuple[str, ...], dtype: torch.dtype, tier: str) -> Resting:
        """Make a place for one state on `tier`, zero at first."""

    def extra_host(self, count_bytes: int) -> Tensor:
        """Allocate host memory, uint8, for what not every step needs."""

    def save(self, state: Resting, source: Buffer) -> Job | None:
        """Replace what `state` holds by what `source` does; None when that is done, else what it ends with."""


def view(flat: Tensor, slot: Slot) -> Tensor:
    """View of one parameter's elements in `flat`, which is a whole flat space, in the parameter's shape."""
    return flat.as_strided(slot.shape, slot.strides, flat.storage_offset() + slot.offset)


AsSeen = Callable[[Tensor], Tensor]
"""Function from values at rest to what is seen of them, as when they are sent in 8 bits."""


def copy_changed(state: Resting, written: Resting, as_seen: AsSeen = lambda values: values) -> None:
    """Replace the values of `state` that do not round to those in `written`."""
    for part in state.cuts(state.range):
        with state.opened(part, "change") as values, written.opened(part) as new:
            value = new.to(values.device)
            values.copy_(torch.where(as_seen(values).to(value.dtype) == value, values, value.to(values.dtype)))


def differ(state: Resting, written: Resting, as_seen: AsSeen = lambda values: values) -> bool:
    """Whether values of `state` do not round to those in `written`."""
    for part in state.cuts(state.range):
        with state.opened(part) as values, written.opened(part) as new:
            seen = as_seen(values).to(device=new.device, dtype=new.dtype)
            if not (torch.equal(seen, new) or torch.allclose(seen, new, rtol=0, atol=0, equal_nan=True)):
                return True
    return False
