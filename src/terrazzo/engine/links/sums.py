"""Sums whose order is promised (see docs/numerics.md), and their one division."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["add_in_order", "divide"]


def add_in_order(parts: Sequence[Tensor], total: Tensor) -> None:
    """Sum two or more tensors in order, in the dtype of `total`, which may share memory with any of them."""
    begun = parts[0].to(total.dtype)
    for part in parts[1:-1]:
        begun = torch.add(begun, part)
    torch.add(begun, parts[-1], out=total)


def divide(total: Tensor, denominator: float) -> Tensor:
    """`total` divided in place; left alone by a denominator of one."""
    return total if denominator == 1 else total.div_(denominator)
