"""Frozen weights at rest in 4 bits, on any tier: gathered so, and decoded where they are used.

Blocks count from where a parameter begins, and a rank's range is whole blocks, so that in memory and on the wire the
codes are a state of their own, in the space of their bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import Access, Buffer, Resting, Space
from terrazzo.engine.comm.transfer import Moves
from terrazzo.engine.formats.block_format import BlockCodes
from terrazzo.engine.formats.format_names import FrozenFormat
from terrazzo.engine.plan.layout import Range, tiles

__all__ = ["PackedWeight", "room_for", "unpack"]


@dataclass(eq=False)
class PackedWeight(Resting):
    """The elements of `space.range(axes)` of frozen weights. They are read in bf16, which loses nothing: what is read
    and written back has the same values.

    Attributes:
        codes: where the bytes are.
    """

    space: Space
    axes: tuple[str, ...]
    codes: Resting
    form: FrozenFormat

    @property
    def dtype(self) -> torch.dtype:
        """That in which it is read; it is written in fp32."""
        return torch.bfloat16

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    def cuts(self, wanted: Range) -> Iterator[Range]:
        own, blocks = self.range.intersect(wanted), self.form.blocks
        for part in self.codes.cuts(own.around(blocks).as_bytes(blocks)):
            elements = part.as_elements(blocks)
            yield from (cut for tile in tiles(elements, self.device.type) if (cut := tile.intersect(own)).numel)

    @property
    def device(self) -> torch.device:
        """Where they are decoded."""
        return self.codes.data.device if isinstance(self.codes, Buffer) else torch.device("cpu")

    @contextlib.contextmanager
    def opened(self, wanted: Range, access: Access = "read") -> Iterator[Tensor]:
        own, blocks = self.range.intersect(wanted), self.form.blocks
        spanned = own.around(blocks)
        with self.codes.opened(spanned.as_bytes(blocks), "read" if access == "read" else "change") as codes:
            values = blocks.decode(codes)
            if access == "read":
                yield values[own.within(spanned)].bfloat16()
                return
            yield values[own.within(spanned)]
            blocks.encode(values, codes)

    def load(self, into: Tensor) -> Moves[None]:
        yield from ()
        for part in self.cuts(self.range):
            with self.opened(part) as data:
                into[part.within(self.range)].copy_(data)


def room_for(space: Space, blocks: BlockCodes, full: Tensor) -> Buffer:
    """Memory for all the bytes of whole weights at the end of that which they will be decoded into, `full`.

    A tile's values are written below the bytes of the next, as long as tiles are decoded one after the other.
    """
    packed = space.packed(blocks)
    raw = full.view(torch.uint8)
    start = (raw.numel() - packed.layout.numel) // _ALIGN_BYTES * _ALIGN_BYTES
    return Buffer(packed, (), raw[start : start + packed.layout.numel])


_ALIGN_BYTES = 64


def unpack(codes: Tensor, blocks: BlockCodes, into: Tensor) -> None:
    """Decode whole weights.

    Args:
        codes: uint8, of all blocks; they may lie in `room_for` them, and are lost then.
        into: 1-D, of any dtype; the values are those that bf16 holds.
    """
    for part, packed in blocks.tiles(into):
        into[part] = blocks.decode(codes[packed]).bfloat16()  # as they are saved, whatever is computed in
