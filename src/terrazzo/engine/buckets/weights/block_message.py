"""Weights on their way in blocks of codes: encoded on each rank, gathered, and decoded where they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import Space
from terrazzo.engine.comm.transfer import Moves
from terrazzo.engine.formats.block_format import BlockCodes
from terrazzo.engine.instrumentation.traffic import Ledger

__all__ = ["BlockMessage"]


class BlockMessage:
    """Elements of a bucket on their way, in blocks.

    Args:
        space: of the elements.
        axes: over which they are split when they have arrived.
        blocks: their format.
        through: the dtype that they are rounded to before.
    """

    def __init__(
        self, space: Space, axes: tuple[str, ...], blocks: BlockCodes, through: torch.dtype, ledger: Ledger
    ) -> None:
        self._space, self._blocks, self._through, self._ledger = space, blocks, through, ledger
        self._message = space.as_bytes(blocks).empty(axes, torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, to be counted while it is there."""
        return self._message.nbytes

    def bring(self, own: Tensor, axes: tuple[str, ...]) -> Moves[None]:
        """Send this rank's elements, and receive those of the others.

        Args:
            own: those that splitting over the longer list `axes` leaves, in any dtype.
        """
        into = self._message.narrow(axes).data
        with self._ledger.holding(self._scratch_bytes(own)):
            for part, coded in self._blocks.tiles(own):
                self._blocks.encode(own[part].to(self._through), into[coded])
        yield from self._message.complete(axes)

    def unpack(self, into: Tensor) -> None:
        """Put what has arrived into a tensor of any dtype; this rank's own elements are as the others see them."""
        with self._ledger.holding(self._scratch_bytes(into)):
            for part, coded in self._blocks.tiles(into):
                values = self._blocks.decode(self._message.data[coded])
                into[part].copy_(values if into.dtype == self._through else values.to(self._through))

    def _scratch_bytes(self, values: Tensor) -> int:
        return self._blocks.scratch_bytes(self._space.layout.numel, values.device.type)
