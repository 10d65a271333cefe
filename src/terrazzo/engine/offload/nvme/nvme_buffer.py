"""A state that rests on `nvme`: read from swap files, and written to them, in cells of one block that never overlap."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import Access, Resting, Space
from terrazzo.engine.comm.transfer import Handle, Moves
from terrazzo.engine.offload.nvme.swap_space import Pending, SwapSpace, page_aligned
from terrazzo.engine.plan.layout import Range, padded_bytes, round_up
from terrazzo.engine.runtime.device import Stream
from terrazzo.engine.runtime.worker import Worker

__all__ = ["NvmeBuffer", "NvmeTier"]


class NvmeTier:
    """The tier `nvme` of this rank: its swap files, and what reading them for computation takes.

    Args:
        cell_numel: elements of each state that are read and written together.
        buffers: blocks of host memory for weights on their way to the device, uint8 and page-aligned.
        copies: from there to the device.
    """

    def __init__(self, swap: SwapSpace, cell_numel: int, buffers: Sequence[Tensor], copies: Stream) -> None:
        self.swap, self.cell_numel, self.buffers, self.copies = swap, cell_numel, buffers, copies
        self.reader = Worker("terrazzo-read")


@dataclass(eq=False)
class NvmeBuffer(Resting):
    """The elements of `space.range(axes)` in swap files, from byte `offset` on; zero at first.

    Attributes:
        cell_numel: elements of a cell.
    """

    space: Space
    axes: tuple[str, ...]
    stored: torch.dtype
    nvme: NvmeTier
    offset: int
    cell_numel: int

    @property
    def dtype(self) -> torch.dtype:
        return self.stored

    def cuts(self, wanted: Range) -> Iterator[Range]:
        for cell in self.range.pieces(self.cell_numel):
            if (part := cell.intersect(wanted)).numel:
                yield part

    @contextlib.contextmanager
    def opened(self, wanted: Range, access: Access = "read") -> Iterator[Tensor]:
        own = self.range.intersect(wanted)
        spanned = self._span(own)
        raw = page_aligned(padded_bytes(spanned.numel * self.dtype.itemsize))
        whole = raw.view(self.dtype)[: spanned.numel]
        if access != "replace" or own != spanned:
            self._each(spanned, raw, write=False)
        yield whole[own.within(spanned)]
        if access != "read":
            self._each(spanned, raw, write=True)

    def load(self, into: Tensor) -> Moves[None]:
        mark = Stream.current(into.device).mark()
        yield Handle([self.nvme.reader.submit(lambda: self._fill(into, mark))], [into])

    def read(self, cell: Range, into: Tensor) -> Pending:
        """Start reading one cell.

        Args:
            into: uint8, page-aligned, of the cell's bytes rounded up to pages.
        """
        return self.nvme.swap.read(self._at(cell), into)

    def write(self, cell: Range, data: Tensor) -> Pending:
        """Start writing one cell; `data` as for `read`, and unchanged until it is waited for."""
        return self.nvme.swap.write(self._at(cell), data)

    def _at(self, cell: Range) -> int:
        return self.offset + (cell.start - self.range.start) * self.dtype.itemsize

    def _span(self, elements: Range) -> Range:
        """The whole cells that `elements` touches."""
        origin, size = self.range.start, self.cell_numel
        first = origin + (elements.start - origin) // size * size
        return Range(first, min(self.range.stop, origin + round_up(elements.stop - origin, size)))

    def _each(self, spanned: Range, raw: Tensor, write: bool) -> None:
        """Read or write whole cells, and wait for them."""
        under_way = []
        for cell in spanned.pieces(self.cell_numel):
            start = (cell.start - spanned.start) * self.dtype.itemsize
            block = raw[start : start + padded_bytes(cell.numel * self.dtype.itemsize)]
            under_way.append(self.write(cell, block) if write else self.read(cell, block))
        for pending in under_way:
            pending.wait()

    def _fill(self, into: Tensor, mark: torch.Event | None) -> None:
        """Read everything into a tensor, as many cells at once as there are buffers."""
        under_way: deque[tuple[Range, Tensor, Pending]] = deque()
        cell_bytes = padded_bytes(min(self.cell_numel, self.range.numel) * self.dtype.itemsize)
        free = [block for block in self.nvme.buffers if block.numel() >= cell_bytes] or [page_aligned(cell_bytes)]
        with self.nvme.copies.completing(mark):
            for cell in self.range.pieces(self.cell_numel):
                if not free:
                    free.append(self._take(under_way, into))
                block = free.pop()
                part = block[: padded_bytes(cell.numel * self.dtype.itemsize)]
                under_way.append((cell, block, self.read(cell, part)))
            while under_way:
                self._take(under_way, into)

    def _take(self, under_way: deque[tuple[Range, Tensor, Pending]], into: Tensor) -> Tensor:
        """Copy the oldest cell under way to its place; returns its buffer, free again."""
        cell, block, pending = under_way.popleft()
        pending.wait()
        into[cell.within(self.range)].copy_(block.view(self.dtype)[: cell.numel])
        return block
