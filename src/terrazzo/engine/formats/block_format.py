"""Blocks of elements that are kept or sent together: their sizes, and what is asked of the format of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BlockCodes", "BlockFormat", "tile_numel"]


@dataclass(frozen=True)
class BlockFormat:
    """Codes and the scales that they share; what is kept so begins on a multiple of a block.

    Attributes:
        numel: elements of a block: a power of two, and no more than are decoded at once.
        nbytes: bytes that it is kept in.
    """

    numel: int
    nbytes: int

    @property
    def bytes_per_element(self) -> float:
        """Bytes that one element takes, with its part of the block's scales."""
        return self.nbytes / self.numel

    def size_bytes(self, numel: int) -> int:
        """Bytes of so many elements, in whole blocks."""
        return numel // self.numel * self.nbytes

    def tiles(self, values: Tensor) -> Iterator[tuple[slice, slice]]:
        """Whole blocks that are encoded or decoded at once: where they are among the elements, and among the bytes.

        Args:
            values: all elements, 1-D.
        """
        step = tile_numel(values.device.type)
        for start in range(0, values.numel(), step):
            stop = min(start + step, values.numel())
            yield slice(start, stop), slice(self.size_bytes(start), self.size_bytes(stop))


class BlockCodes(BlockFormat, ABC):
    """Blocks of weights, of gradients, or of what an optimizer keeps.

    Three things hold of each format, so that neither the plan, the ranks nor a checkpoint changes a bit: the bytes of a
    block follow from its values alone; values that have been decoded are encoded to the same bytes again (of frozen
    weights also after they were rounded to bf16, as they are saved; of squares down to a bound that `state_blocks`
    has); and a value that is not finite makes its block not finite.
    """

    @abstractmethod
    def encode(self, values: Tensor, into: Tensor) -> None:
        """Replace the blocks `into` by those of `values`.

        Args:
            values: 1-D, of whole blocks, floating-point.
            into: uint8, `nbytes` for each block.
        """

    @abstractmethod
    def decode(self, packed: Tensor) -> Tensor:
        """The values of whole blocks, 1-D fp32, in memory of their own. `packed`: uint8, as `encode` fills them."""

    @abstractmethod
    def coding_bytes(self, numel: int) -> int:
        """Bytes beside the codes and the result that it takes to code elements within a step.

        That is to decode them into a tensor of any dtype, and of what is sent also to encode them; of what an optimizer
        keeps, to step them.

        Args:
            numel: elements, a tile at most.
        """

    def scratch_bytes(self, numel: int, device: str) -> int:
        """Memory to code any number of elements, tile by tile, on a kind of device: see `coding_bytes`."""
        return self.coding_bytes(min(numel, tile_numel(device)))

    def as_decoded(self, values: Tensor, through: torch.dtype) -> Tensor:
        """Return `values` encoded and decoded again.

        Args:
            values: 1-D, from the beginning of a block.
            through: the dtype that they are rounded to before they are encoded, and that the result has.
        """
        seen = torch.empty_like(values, dtype=through)
        for part, _ in self.tiles(values):
            own = values[part].to(through)
            blocks = own.new_zeros(-(-own.numel() // self.numel) * self.numel)
            blocks[: own.numel()] = own
            packed = torch.empty(self.size_bytes(blocks.numel()), dtype=torch.uint8, device=own.device)
            self.encode(blocks, packed)
            seen[part] = self.decode(packed)[: own.numel()]
        return seen


def tile_numel(device: str) -> int:
    """Elements that are coded at once on a kind of device: they fit the caches of a CPU, and fill a GPU."""
    return 1 << (16 if device == "cpu" else 21)
