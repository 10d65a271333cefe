"""Sorts rows of tokens by their experts, and back.

A token that several experts compute has one row for each. Sorting is stable. Rows are moved and never added up, so that
the order of sums does not depend on it.
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
        order: the old place of each sorted row, int64 `[rows]`.
        inverse: the sorted place of each row, int64 `[rows]`.
    """

    order: Tensor
    inverse: Tensor

    @classmethod
    def by(cls, expert: Tensor) -> RowOrder:
        """The order by each row's number of its expert, int64 `[rows]`. Numbers above those of experts come last."""
        order = expert.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return cls(order, inverse)

    def to(self, device: torch.device) -> RowOrder:
        """A copy on a device, for which the host does not wait."""
        return RowOrder(*(each.to(device, non_blocking=True) for each in self))

    def sort(self, rows: Tensor) -> Tensor:
        """`rows`, `[rows, ...]`, sorted by expert."""
        return _permuted(rows, self.order, self.inverse)

    def restore(self, rows: Tensor) -> Tensor:
        """Sorted rows in their old order."""
        return _permuted(rows, self.inverse, self.order)


class _Permuted(torch.autograd.Function):
    """Rows in another order. Each occurs once, so gradients are moved, and not added up as by indexing."""

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
