"""Numbers that an optimizer keeps for each element, in one byte each: blocks of 256 with a scale of their own.

A block is 260 bytes: 256 codes, and the largest magnitude among them in fp32. An average of gradients is kept as it is,
one of their squares as its root, whose range is half as wide. Codes are powers of two of equal distance under `int8`,
and floating-point numbers of 8 bits (e4m3) under `fp8`, both of the ratio to the block's scale.

What lies between two codes is rounded up as often as it is near the upper one, by an order of thresholds that the
block's scale and an element's place in its block decide. Rounding to the nearest would hold an average still that moves
by less than half the distance of codes in a step, as that of squares does. So a block's bytes follow from its values
alone, and codes that are decoded and encoded again are the same: neither the plan, the ranks nor a checkpoint between
two steps changes a bit. Of squares this holds for blocks whose largest root is 2^-44 (6e-14) or more: far below that
the smallest squares are no normal numbers in fp32, and have fewer bits than their roots, or none.

A value that is not finite makes its block not finite. A positive square never becomes zero, which would divide by it:
roots below the smallest code's ratio to the block's scale, 2^-18 under `int8` and 2^-9 / 448 under `fp8`, become that.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from terrazzo.engine.formats.block_format import BlockCodes
from terrazzo.engine.runtime.device import HOST

__all__ = ["STATE_FP8", "STATE_INT8", "StateBlocks"]

_NUMEL = 256
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LEAST = 2.0**-9
"""The smallest positive number in e4m3."""
_LEAST_NORMAL = 2.0**-6
_LEVELS = {True: 14, False: 7}
"""Codes for each factor of two: of roots of squares, which have no sign, and of others."""


_IS_OF_SQUARES = {"exp_avg": False, "exp_avg_sq": True, "max_exp_avg_sq": True, "momentum_buffer": False}
"""States per element that may be in 8 bits, as optimizers call them, and whether each is an average of squares."""


@dataclass(frozen=True)
class StateBlocks(BlockCodes):
    """Codes of a byte, and their scale in fp32 after them.

    Attributes:
        squares: whether they are of an average of squares, which has codes of its own.
    """

    squares: bool = False

    def of(self, kind: str) -> Self:
        """The blocks of the state that optimizers call `kind`."""
        return replace(self, squares=_IS_OF_SQUARES[kind])

    def encode(self, values: Tensor, into: Tensor) -> None:
        rows = values.view(-1, self.numel)
        rows = rows.sqrt() if self.squares else rows
        scale = rows.abs().amax(1, keepdim=True)
        ratio = rows / torch.where(scale == 0, 1.0, scale)
        thresholds = _thresholds(scale)
        blocks = into.view(-1, self.nbytes)
        blocks[:, : self.numel] = self._codes(ratio, thresholds)
        blocks.view(torch.float32)[:, self.numel // 4 :] = scale

    def decode(self, packed: Tensor) -> Tensor:
        blocks = packed.view(-1, self.nbytes)
        table = self._table(packed.device)
        values = table.index_select(0, blocks[:, : self.numel].reshape(-1).int()).view(-1, self.numel)
        values.mul_(blocks.view(torch.float32)[:, self.numel // 4 :])
        return (values.square_() if self.squares else values).view(-1)

    def coding_bytes(self, numel: int) -> int:
        """Memory of a step: what is decoded, what is stepped with it, and new codes."""
        return 32 * numel

    @abstractmethod
    def _codes(self, ratio: Tensor, thresholds: Tensor) -> Tensor:
        """The codes of ratios to the block's scale, uint8 [blocks, numel]."""

    @abstractmethod
    def _table(self, device: torch.device) -> Tensor:
        """The ratio that each code stands for, fp32 [256]."""


class _Powers(StateBlocks):
    """Code 0 is zero; the largest is a ratio of 1, and the others powers of two below it. The highest bit is a sign."""

    def _codes(self, ratio: Tensor, thresholds: Tensor) -> Tensor:
        last = 255 if self.squares else 127
        position = ratio.abs().log2_().mul_(_LEVELS[self.squares]).add_(last).add_(thresholds).floor_()
        if self.squares:
            return position.clamp_(1, last).mul_(ratio > 0).to(torch.uint8)
        codes = position.clamp_(0, last).to(torch.uint8)
        return codes.add_((ratio < 0) & (codes > 0), alpha=128)

    def _table(self, device: torch.device) -> Tensor:
        return _powers(self.squares, device)


class _SmallFloats(StateBlocks):
    """Numbers in e4m3."""

    def _codes(self, ratio: Tensor, thresholds: Tensor) -> Tensor:
        scaled = ratio * _LARGEST
        below = scaled.abs().mul_(2**18).int().add_(thresholds.mul(2**9).int()).bitwise_right_shift_(9)
        below = below.mul(_LEAST).copysign_(scaled)
        bits = scaled.view(torch.int32).add(thresholds.mul_(2**20).int()).bitwise_and_(-(2**20))
        # e4m3 keeps three bits after the first of an fp32 number, and below its normal ones steps of the least
        values = torch.where(scaled.abs() < _LEAST_NORMAL, below, bits.view(torch.float32))
        if self.squares:
            values = torch.where(ratio > 0, values.clamp_(min=_LEAST), 0.0)
        return values.to(torch.float8_e4m3fn).view(torch.uint8)

    def _table(self, device: torch.device) -> Tensor:
        return _small_floats(device)


STATE_INT8 = _Powers(_NUMEL, _NUMEL + 4)
STATE_FP8 = _SmallFloats(_NUMEL, _NUMEL + 4)


def _thresholds(scale: Tensor) -> Tensor:
    """One for each element, above which part of the distance of two codes it is rounded down: of (1, 3, ... 511) / 512.

    Each block has all 256 in another order, which changes with the scale, and so in the course of training.
    """
    first = (scale.view(torch.int32).long() * 2654435761 >> 24).to(torch.uint8)
    order = torch.arange(_NUMEL, device=scale.device, dtype=torch.int32).mul_(159).to(torch.uint8)
    return (first + order).float().mul_(1 / 256).add_(1 / 512)


@functools.cache
def _powers(squares: bool, device: torch.device) -> Tensor:
    levels, last = _LEVELS[squares], 255 if squares else 127
    sizes = [math.exp2((code - last) / levels) if code else 0.0 for code in range(last + 1)]
    return torch.tensor(sizes if squares else [*sizes, *(-size for size in sizes)], device=device)


@functools.cache
def _small_floats(device: torch.device) -> Tensor:
    codes = torch.arange(256, dtype=torch.uint8, device=HOST).view(torch.float8_e4m3fn)
    return (codes.double() / _LARGEST).float().to(device)
