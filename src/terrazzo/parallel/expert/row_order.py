"""Rows in the order of their experts, and back: moved, never added into each other, so that all sums have one order.

A token that several experts compute is as many rows; those of one expert stay in the order in which they were.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["RowOrder"]


class RowOrder(NamedTuple):
    """How rows are sorted by their experts.

    Attributes:
        order: of the sorted rows, where each was; int64.
        inverse: of the rows as they were, where each is among the sorted ones.
    """

    order: Tensor
    inverse: Tensor

    @classmethod
    def by(cls, expert: Tensor) -> RowOrder:
        """The order by the number of each row's expert, int64 `[rows]`; numbers that are no expert's come last."""
        order = expert.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return cls(order, inverse)

    def to(self, device: torch.device) -> RowOrder:
        """The same on a device, for which nobody waits here."""
        return RowOrder(*(each.to(device, non_blocking=True) for each in self))

    def sort(self, rows: Tensor) -> Tensor:
        """`rows` `[rows, ...]`, by expert."""
        return _permuted(rows, self.order, self.inverse)

    def restore(self, rows: Tensor) -> Tensor:
        """Sorted rows, as they were."""
        return _permuted(rows, self.inverse, self.order)


class _Permuted(torch.autograd.Function):
    """Rows in another order; no two are one, so that gradients are moved and not added up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def _permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    moved: Tensor = _Permuted.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return moved
