"""The buffers that states on `nvme` stream through: pieces of host memory, each with one cell of a bucket at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.gradients.summed import SummedGradient
from terrazzo.engine.buckets.resting.coded import CodedState
from terrazzo.engine.buckets.resting.with_remainder import WithRemainder
from terrazzo.engine.formats.block_format import BlockFormat
from terrazzo.engine.offload.nvme.nvme_buffer import NvmeBuffer
from terrazzo.engine.offload.nvme.swap_space import Pending
from terrazzo.engine.optim.segments.off_device_updates import Uses
from terrazzo.engine.plan.layout import Range, padded_bytes

__all__ = ["StagingBuffer"]


@dataclass
class _Entry:
    """One state's part of a staging buffer; of one in `blocks`, its bytes are what is read."""

    state: NvmeBuffer
    raw: Tensor
    writes: bool
    blocks: BlockFormat | None

    def of(self, elements: Range) -> Range:
        """The range of `elements` in what `state` stores."""
        return _as_stored(elements, self.blocks)


class StagingBuffer:
    """One cell at a time of a bucket whose optimizer state is on `nvme`: `master`, the moments by name, and where they
    are there too, `remainder`, `weight` and `grad`.

    Args:
        raw: uint8, page-aligned, large enough for every state's cell.
    """

    def __init__(self, raw: Tensor) -> None:
        self._raw = raw
        self._bucket: Bucket | None = None
        self._cell = Range(0, 0)
        self._entries: dict[str, _Entry] = {}
        self._reading: list[Pending] = []
        self._writing: list[Pending] = []

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def holds(self, bucket: Bucket, cell: Range) -> bool:
        return self._bucket is bucket and self._cell == cell

    def part(self, key: str, wanted: Range) -> Tensor:
        """The elements of `wanted` of one state, a view; of one in 8 bits, the bytes of these blocks."""
        entry = self._entries[key]
        cell = entry.of(self._cell)
        return entry.raw.view(entry.state.dtype)[: cell.numel][entry.of(wanted).within(cell)]

    def read(
        self, bucket: Bucket, cell: Range, known: Sequence[str], finished: SummedGradient | None, uses: Uses
    ) -> None:
        """Start reading a cell's states.

        Args:
            known: the moments that exist; the others are zero.
            finished: the bucket's gradient, if there is any.
            uses: those that are asked for.
        """
        self._bucket, self._cell, self._entries, offset = bucket, cell, {}, 0
        if uses.weights:
            offset = self._add("master", bucket.master, offset, writes=True)
            if isinstance(bucket.exact, WithRemainder):
                offset = self._add("remainder", bucket.exact.remainder, offset, writes=True)
        for key, state in bucket.moments.items() if uses.moments else ():
            offset = self._add(key, state, offset, writes=key in known)
        if uses.weights and (weight := bucket.own_weight) is not None:
            offset = self._add("weight", weight, offset, writes=True)
        if uses.moments and finished is not None:
            self._add("grad", finished.wait(), offset, writes=False)
        wanted = ("master", "remainder", "grad", *known)
        self._reading = [e.state.read(e.of(cell), e.raw) for key, e in self._entries.items() if key in wanted]
        for key in bucket.moments.keys() & self._entries.keys():
            if key not in known:
                self._entries[key].raw.zero_()

    def keep(self, key: str) -> None:
        """A state exists from now on."""
        self._entries[key].writes = True

    def write(self) -> None:
        """Start writing what may have changed."""
        cell, entries = self._cell, self._entries.values()
        self._writing = [entry.state.write(entry.of(cell), entry.raw) for entry in entries if entry.writes]

    def finish_reading(self) -> None:
        for pending in self._reading:
            pending.wait()
        self._reading = []

    def finish_writing(self) -> None:
        for pending in self._writing:
            pending.wait()
        self._writing = []

    def _add(self, key: str, state: object, offset: int, *, writes: bool) -> int:
        """Give a state that is on `nvme` its part of the memory; returns where the next one begins."""
        stored, blocks = (state.codes, state.blocks) if isinstance(state, CodedState) else (state, None)
        own = _as_stored(self._cell, blocks)
        if not isinstance(stored, NvmeBuffer) or not stored.range.intersect(own).numel:
            return offset
        end = offset + padded_bytes(own.numel * stored.dtype.itemsize)
        self._entries[key] = _Entry(stored, self._raw[offset:end], writes, blocks)
        return end


def _as_stored(elements: Range, blocks: BlockFormat | None) -> Range:
    """The range of these elements in what is stored: the bytes of their blocks, if they are in blocks."""
    return elements if blocks is None else elements.as_bytes(blocks)
