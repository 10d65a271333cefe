"""A hash that ranks compare in the place of a tensor, to see whether they hold the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.runtime.device import HOST

__all__ = ["compared_digest", "digest"]


def digest(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bytes in their order, 0-d int64; equal tensors on one kind of device have equal ones.

    On a device it is made there: nothing is waited for.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.device.type == "cpu":
        return torch.tensor(zlib.crc32(raw.numpy().data), dtype=torch.int64, device=HOST)
    return _hashed(raw)


def compared_digest(tensor: Tensor, axes: Axes, along: Iterable[str]) -> Tensor:
    """The digest that ranks compare along some axes of a tensor, on whichever device each has it; 0 on a rank alone."""
    return digest(tensor.cpu()) if axes.live(along) else torch.zeros((), dtype=torch.int64, device=HOST)


_WORDS = 1 << 19
"""Words of eight bytes that are hashed at once: 4 MiB, and three times that for a moment."""
_GOLDEN = -0x61C8864680B583EB
"""2^64 over the golden ratio, as a signed number: what tells positions apart."""


def _hashed(raw: Tensor) -> Tensor:
    """The sum of `_mixed` words, each with its position in it, and the length: sums alone could cancel out."""
    total = torch.full((), raw.numel(), dtype=torch.int64, device=raw.device)
    for start in range(0, raw.numel(), 8 * _WORDS):
        piece = raw[start : start + 8 * _WORDS]
        words = torch.zeros(-(-piece.numel() // 8), dtype=torch.int64, device=raw.device)
        words.view(torch.uint8)[: piece.numel()].copy_(piece)
        positions = torch.arange(start // 8 + 1, start // 8 + 1 + words.numel(), device=raw.device)
        total += _mixed(words.bitwise_xor_(positions.mul_(_GOLDEN))).sum()
    return _mixed(total)


def _mixed(words: Tensor) -> Tensor:
    """Every bit of an int64 depends on every bit, in place: the last steps of SplitMix64."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        high = (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # without the sign
        words.bitwise_xor_(high).mul_(factor)
    return words
