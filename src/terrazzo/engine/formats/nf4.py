"""Frozen weights in 4 bits: NF4 of QLoRA (Dettmers et al., arXiv 2305.14314), blocks of 64 of a parameter.

A code is one of sixteen levels from -1 to 1, which hold equally many of normally distributed values, and stands for a
ratio to the largest magnitude in its block. Two codes share a byte, the first in its higher half. Under `nf4` a block
is 34 bytes: 32 of codes, and its scale in bf16. Under `nf4-double` scales are quantised too: 256 blocks are 8,450
bytes, their codes, a byte for each scale, and the largest scale in bf16; a scale is one of 255 ratios to that, sixteen
to each factor of two.

The largest element of a block is its scale again, to the bit, so that values that are decoded, rounded to bf16 and
encoded again are the same ones. A block's bytes follow from its values alone: neither the plan, the ranks nor a
checkpoint changes a bit. A value that is not finite makes the values that share its scale not finite.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from terrazzo.engine.formats.block_format import BlockCodes
from terrazzo.engine.runtime.device import HOST

__all__ = ["NF4_BLOCKS", "NF4_DOUBLE_BLOCKS"]

_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Appendix E of the paper."""

_NUMEL = 64
"""Elements of a block."""
_CODES = _NUMEL // 2
"""Bytes of a block's codes."""
_GROUP = 256
"""Blocks that share a scale of their scales."""
_OCTAVE = 16
"""Ratios of scales for each factor of two."""


class _FourBits(BlockCodes):
    def coding_bytes(self, numel: int) -> int:
        """Values in fp32, and either what they are looked up by or themselves in bf16; before that their scales."""
        return 6 * numel + torch.float32.itemsize * (numel // _NUMEL)


class _Nf4(_FourBits):
    """Each block's codes, and its scale in bf16 after them."""

    def encode(self, values: Tensor, into: Tensor) -> None:
        blocks, rows = values.view(-1, _NUMEL), into.view(-1, self.nbytes)
        largest = blocks.abs().amax(1, keepdim=True)
        rows[:, _CODES:].view(torch.bfloat16).copy_(largest)
        rows[:, :_CODES] = _codes(blocks, largest)

    def decode(self, packed: Tensor) -> Tensor:
        rows = packed.view(-1, self.nbytes)
        return _values(rows[:, :_CODES], rows[:, _CODES:].view(torch.bfloat16).float())


class _Nf4Double(_FourBits):
    """The codes of a group of blocks, one byte for the scale of each, and the largest scale in bf16."""

    def encode(self, values: Tensor, into: Tensor) -> None:
        blocks, rows = values.view(-1, _NUMEL), into.view(-1, self.nbytes)
        groups = blocks.abs().amax(1, keepdim=True).view(-1, _GROUP)
        highest = groups.amax(1, keepdim=True).bfloat16()
        ratio = groups / torch.where(highest == 0, 1.0, highest.float())
        scale_codes = torch.bucketize(ratio, _edges_of_scales(values.device)).add_(1).clamp_(max=255).mul_(groups > 0)
        rows[:, -2:].view(torch.bfloat16).copy_(highest)
        rows[:, _CODES * _GROUP : -2] = scale_codes.to(torch.uint8)
        scales = _scales(rows[:, _CODES * _GROUP : -2], highest)
        rows[:, : _CODES * _GROUP] = _codes(blocks, scales.view(-1, 1)).view(len(rows), -1)

    def decode(self, packed: Tensor) -> Tensor:
        rows = packed.view(-1, self.nbytes)
        scales = _scales(rows[:, _CODES * _GROUP : -2], rows[:, -2:].view(torch.bfloat16))
        return _values(rows[:, : _CODES * _GROUP], scales)


NF4_BLOCKS = _Nf4(_NUMEL, _CODES + 2)
NF4_DOUBLE_BLOCKS = _Nf4Double(_GROUP * _NUMEL, _GROUP * (_CODES + 1) + 2)


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """1-D fp32. `codes`: uint8, of whole blocks; `scales`: fp32, one for each block."""
    values = _pairs(codes.device).index_select(0, codes.reshape(-1).int()).view(-1, _NUMEL)
    return values.mul_(scales.view(-1, 1)).view(-1)


def _codes(blocks: Tensor, scales: Tensor) -> Tensor:
    """Two to a byte, uint8 [blocks, 32]: of the levels nearest to the ratio of each element to its block's scale."""
    ratio = blocks * torch.where(scales == 0, 1.0, scales).reciprocal_()
    codes = torch.bucketize(ratio, _edges(blocks.device), out_int32=True).to(torch.uint8)
    return codes[:, 0::2].bitwise_left_shift(4).bitwise_or_(codes[:, 1::2])


def _scales(codes: Tensor, highest: Tensor) -> Tensor:
    """Scales of blocks from their codes and the largest of each group: fp32 [groups, 256] of values that bf16 holds."""
    ratios = _ratios_of_scales(codes.device).index_select(0, codes.reshape(-1).int()).view(-1, _GROUP)
    return ratios.mul_(highest.float()).bfloat16().float()


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """The two levels that each byte stands for, fp32 [256, 2]."""
    levels = torch.tensor(_LEVELS, device=HOST)
    return torch.cartesian_prod(levels, levels).to(device)


@functools.cache
def _edges(device: torch.device) -> Tensor:
    """The middle between each two levels, fp32 [15]."""
    levels = torch.tensor(_LEVELS, dtype=torch.float64, device=HOST)
    return ((levels[1:] + levels[:-1]) / 2).float().to(device)


@functools.cache
def _ratios_of_scales(device: torch.device) -> Tensor:
    """The ratio to the largest scale that each code stands for, fp32 [256]: 0, and powers of two up to 1."""
    return torch.tensor([0.0, *(math.exp2((code - 255) / _OCTAVE) for code in range(1, 256))], device=HOST).to(device)


@functools.cache
def _edges_of_scales(device: torch.device) -> Tensor:
    """Above which ratio each code is after the first that is not zero, fp32 [254]."""
    return torch.tensor([math.exp2((code + 0.5 - 255) / _OCTAVE) for code in range(1, 255)], device=HOST).to(device)
