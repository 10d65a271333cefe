"""Stochastic rounding to bf16: up as often as a value is near the upper neighbour, by bits that all ranks have alike.

An update of less than half of the distance to the next bf16 number, a 256th of the weight, is lost by rounding to the
nearest; on average none is lost here. The bits are a hash of the parameter's name, of an element's place in it and of
the number of the step, so that neither the plan nor the ranks change them.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

__all__ = ["round_stochastically"]


def round_stochastically(values: Tensor, name: str, elements: Tensor, step: Tensor) -> Tensor:
    """`values` as bf16, in new memory; what is not finite stays so.

    Args:
        values: fp32, 1-D, elements of one parameter.
        name: of the parameter.
        elements: which of the whole parameter they are, int64, flat and row-major.
        step: number of the step, 0-d.
    """
    key = step.to(device=values.device, dtype=torch.int64) * 0x9E3779B1 + zlib.crc32(name.encode())
    bits = _mixed(_mixed(elements & _MASK) ^ (key & _MASK)) & 0xFFFF
    rounded = (values.view(torch.int32) + bits.int()).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


_MASK = 0xFFFFFFFF


def _mixed(numbers: Tensor) -> Tensor:
    """A permutation of the numbers of 32 bits in which any bit may change any other (Wellons's lowbias32)."""
    numbers = (numbers ^ (numbers >> 16)) * 0x7FEB352D & _MASK
    numbers = (numbers ^ (numbers >> 15)) * 0x846CA68B & _MASK
    return numbers ^ (numbers >> 16)
