"""Sums whose order is promised (see docs/numerics.md), their one division, and what they are multiplied by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terrazzo.engine.runtime import device as devices

__all__ = ["add_in_order", "divide", "multiply"]


def add_in_order(parts: Sequence[Tensor], total: Tensor) -> None:
    """Sum two or more tensors in order, in the dtype of `total`, which may share memory with any of them."""
    begun = parts[0].to(total.dtype)
    for part in parts[1:-1]:
        begun = torch.add(begun, part)
    torch.add(begun, parts[-1], out=total)


def divide(total: Tensor, denominator: float) -> Tensor:
    """`total` divided in place; left alone by a denominator of one."""
    return total if denominator == 1 else total.div_(denominator)


def multiply(total: Tensor, factor: Tensor) -> Tensor:
    """`total` multiplied in place by a 0-d tensor, whose dtype may be the wider one: it is not rounded before."""
    factor = factor.to(total.device)
    # On CUDA torch rounds a 0-d factor to the dtype of `total` before it multiplies, and one of one dim it does not.
    rounds = devices.is_cuda(total.device) and factor.dtype != total.dtype
    return total.mul_(factor[None] if rounds else factor)
