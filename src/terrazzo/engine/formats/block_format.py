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

    Of each format this holds, so that neither the plan, the ranks nor a checkpoint changes a bit: bytes follow from the
    values of their block alone, and what comes back of values is the same when it is encoded again; of frozen weights
    when it has been rounded to bf16 before, as they are saved. A value that is not finite makes its block not finite.
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
        """Memory to decode so many elements, a tile at most, into a tensor of any dtype, or to encode them if they are
        encoded in a step; of what an optimizer keeps, for a step of them.
        """

    def scratch_bytes(self, numel: int, device: str) -> int:
        """Memory to code any number of elements, tile by tile, on a kind of device: see `coding_bytes`."""
        return self.coding_bytes(min(numel, tile_numel(device)))

    def as_decoded(self, values: Tensor, through: torch.dtype) -> Tensor:
        """What comes back of `values` that are encoded: in the dtype `through`, to which they are rounded before, too.

        Args:
            values: 1-D, from the beginning of a block.
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
