"""What matrices and their gradients look like on the wire where they are sent in blocks: 256 codes and a scale in fp32.

A code is a whole number from -127 to 127 under `int8` and from -7 to 7 under `int4`, two of which make a byte, and a
floating-point number of 8 bits (e4m3) under `fp8`. The scale is that of the largest magnitude of the block, rounded to
16 bits: then a code times its scale is exact in fp32. So values that have been sent once are the same when they are
sent again, on their way over several axes, in backward, and wherever the weights at rest are those that came.

A value that is not finite makes its block not finite.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.engine.formats.block_format import BlockCodes

__all__ = ["SENT_FP8", "SENT_INT4", "SENT_INT8"]


@dataclass(frozen=True)
class _SentBlocks(BlockCodes):
    """Codes, and their scale in fp32 after them.

    Attributes:
        largest: the largest code.
    """

    largest: float

    def encode(self, values: Tensor, into: Tensor) -> None:
        rows, blocks, coded = values.float().view(-1, self.numel), into.view(-1, self.nbytes), self._coded_bytes
        scale = _scale(torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_()) / self.largest)
        codes = rows.div(torch.where(scale == 0, 1.0, scale)).clamp_(-self.largest, self.largest)
        self._store(codes, blocks[:, :coded])
        blocks.view(torch.float32)[:, coded // 4 :] = scale

    def decode(self, packed: Tensor) -> Tensor:
        rows, coded = packed.view(-1, self.nbytes), self._coded_bytes
        return self._load(rows[:, :coded]).mul_(rows.view(torch.float32)[:, coded // 4 :]).view(-1)

    def coding_bytes(self, numel: int) -> int:
        return 12 * numel

    @property
    def _coded_bytes(self) -> int:
        return self.nbytes - torch.float32.itemsize

    @abstractmethod
    def _store(self, codes: Tensor, into: Tensor) -> None:
        """Round codes, fp32 [blocks, numel], which may change, to bytes, uint8 [blocks, coded bytes]."""

    @abstractmethod
    def _load(self, stored: Tensor) -> Tensor:
        """The codes of such bytes, fp32, in memory of their own."""


class _ByteCodes(_SentBlocks):
    def _store(self, codes: Tensor, into: Tensor) -> None:
        into.view(torch.int8).copy_(codes.round_())

    def _load(self, stored: Tensor) -> Tensor:
        return stored.view(torch.int8).float()


class _HalfByteCodes(_SentBlocks):
    """Codes without a sign: the first half of a block is in the low ones of its bytes."""

    _zero = 8

    def _store(self, codes: Tensor, into: Tensor) -> None:
        low, high = codes.round_().add_(self._zero).split(into.shape[1], 1)
        into.copy_(torch.add(low, high, alpha=16))

    def _load(self, stored: Tensor) -> Tensor:
        return torch.cat([stored.bitwise_and(15), stored.bitwise_right_shift(4)], 1).float().sub_(self._zero)


class _FloatCodes(_SentBlocks):
    def _store(self, codes: Tensor, into: Tensor) -> None:
        into.copy_(codes.to(torch.float8_e4m3fn).view(torch.uint8))

    def _load(self, stored: Tensor) -> Tensor:
        return stored.view(torch.float8_e4m3fn).float()


SENT_INT8 = _ByteCodes(256, 256 + 4, largest=127.0)
SENT_INT4 = _HalfByteCodes(256, 128 + 4, largest=7.0)
SENT_FP8 = _FloatCodes(256, 256 + 4, largest=torch.finfo(torch.float8_e4m3fn).max)


def _scale(exact: Tensor) -> Tensor:
    """A scale rounded to 16 bits; one that is not finite stays so, whatever its bits are."""
    rounded = (exact.view(torch.int32) + 0x80).bitwise_and_(-0x100).view(torch.float32)
    return torch.where(exact.isfinite(), rounded, torch.nan)
