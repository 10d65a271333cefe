"""States at rest as blocks of codes, on any tier: what an optimizer keeps in 8 bits, and frozen weights in 4.

Blocks count from where a parameter begins, and a rank's range is whole blocks, so that in memory, in files and on the
wire the codes are a state of their own, in the space of their bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import Access, Buffer, Resting, Space
from terrazzo.engine.formats.block_format import BlockCodes, tile_numel
from terrazzo.engine.plan.layout import Range

__all__ = ["CodedState"]


@dataclass(eq=False)
class CodedState(Resting):
    """The elements of `space.range(axes)` of one state, decoded where they are opened, and encoded again if written.

    Attributes:
        codes: where the bytes are.
        blocks: what they are.
        read_as: the dtype in which they are read, which loses nothing; they are written in fp32.
    """

    space: Space
    axes: tuple[str, ...]
    codes: Resting
    blocks: BlockCodes
    read_as: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.read_as

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    def cuts(self, wanted: Range) -> Iterator[Range]:
        """Yield tiles of what is in memory; of what is in files whole cells, which are read as a whole."""
        own = self.range.intersect(wanted)
        for part in self.codes.cuts(own.around(self.blocks).as_bytes(self.blocks)):
            elements = part.as_elements(self.blocks)
            step = tile_numel(self.codes.data.device.type) if isinstance(self.codes, Buffer) else elements.numel
            yield from (cut for tile in elements.pieces(step) if (cut := tile.intersect(own)).numel)

    @contextlib.contextmanager
    def opened(self, wanted: Range, access: Access = "read") -> Iterator[Tensor]:
        own = self.range.intersect(wanted)
        spanned = own.around(self.blocks)
        with self.codes.opened(spanned.as_bytes(self.blocks), "read" if access == "read" else "change") as codes:
            values = self.blocks.decode(codes)
            if access == "read":
                yield values[own.within(spanned)].to(self.read_as)
            else:
                yield values[own.within(spanned)]
                self.blocks.encode(values, codes)
