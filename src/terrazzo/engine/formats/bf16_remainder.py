"""A number of 32 bits as one in bf16, which is computed with, and 16 bits more: what rounding leaves out.

The sum of both, as whole numbers, is the fp32 number, so that no bit is lost. For that a number in the middle between
two of bf16 becomes the larger in magnitude: where it became the even one, nothing would say which side it came from.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["join_remainder", "split_remainder"]


def split_remainder(values: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest numbers in bf16, and what they leave out, int16; of what is not finite that is 0.

    Args:
        values: fp32.
    """
    bits, finite = values.view(torch.int32), values.isfinite()
    nearest = (bits + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)
    left_out = (bits << 16 >> 16).to(torch.int16)
    return torch.where(finite, nearest, values.bfloat16()), left_out.masked_fill_(~finite, 0)


def join_remainder(nearest: Tensor, left_out: Tensor) -> Tensor:
    """The fp32 numbers that `split_remainder` was given, in new memory.

    A number in bf16 that has been replaced since, which nothing else is known of, stays finite and the nearest one.
    """
    high = nearest.view(torch.int16).int()
    low = torch.where(nearest == 0, left_out.clamp(min=0), left_out)  # below zero there are the bits of NaN
    return (high << 16).add_(low.int()).view(torch.float32)
