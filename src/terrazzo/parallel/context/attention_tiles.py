"""Attention tile by tile: one softmax over tiles that are computed after each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terrazzo.parallel.context import attention_kernels
from terrazzo.parallel.context.attention_kernels import Part, Result
from terrazzo.parallel.context.attention_masks import AttentionMask
from terrazzo.parallel.context.chunks import TokenRun

__all__ = ["Outputs", "TileGradients"]


class Outputs:
    """Outputs over all keys that have been added so far, and their log-sum-exp, in the precision of the latter."""

    def __init__(self, query: Tensor, scale: float) -> None:
        self.query, self.scale = query, scale
        wide = torch.promote_types(query.dtype, torch.float32)
        self._lse = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
        self._out: Tensor | None = None
        self._width = query.shape[-1]

    def add(self, key: Tensor, value: Tensor, mask: AttentionMask, keys: Sequence[TokenRun]) -> None:
        """Take in keys and values, `[B, kv_heads, T, D]`, that are where `keys` says."""
        self._width = value.shape[-1]
        for rows, columns, seen in mask.tiles(keys, self.query.device):
            part = Part(self.query[:, :, rows], key[:, :, columns], value[:, :, columns], seen, self.scale)
            self._merge(rows, *attention_kernels.attend(part))

    def _merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        if self._out is None:
            self._out = self._zeros()
        before, total = self._lse[:, :, rows], self._out[:, :, rows]
        both = torch.logaddexp(before, lse)
        # What sees nothing yet stays minus infinity, whose difference to itself is no number.
        share, other = ((each - both).exp().masked_fill_(each.isneginf(), 0.0) for each in (before, lse))
        total.mul_(share.unsqueeze(-1)).add_(out * other.unsqueeze(-1))
        before.copy_(both)

    def take(self) -> Result:
        """What has come of it."""
        out = self._zeros() if self._out is None else self._out
        return Result(out.to(self.query.dtype), self._lse)

    def _zeros(self) -> Tensor:
        return self._lse.new_zeros((*self.query.shape[:-1], self._width))


class TileGradients:
    """Gradients of queries, keys and values, added up tile by tile in the precision of log-sum-exp.

    Args:
        grad: of the outputs.
        whole: what `Outputs.take` gave.
    """

    def __init__(self, grad: Tensor, query: Tensor, whole: Result, scale: float) -> None:
        self.grad, self.query, self.whole, self.scale = grad.contiguous(), query, whole, scale
        self.of_query = torch.zeros_like(query, dtype=whole.lse.dtype)

    def add(
        self, both: tuple[Tensor, Tensor], totals: tuple[Tensor, Tensor], mask: AttentionMask, keys: Sequence[TokenRun]
    ) -> None:
        """Add what follows from these keys and values, theirs to `totals`, of their shapes."""
        key, value = both
        for rows, columns, seen in mask.tiles(keys, self.query.device):
            part = Part(self.query[:, :, rows], key[:, :, columns], value[:, :, columns], seen, self.scale)
            whole = Result(self.whole.out[:, :, rows], self.whole.lse[:, :, rows])
            gradients = attention_kernels.backward(part, self.grad[:, :, rows], whole)
            self.of_query[:, :, rows] += gradients[0]
            totals[0][:, :, columns] += gradients[1]
            totals[1][:, :, columns] += gradients[2]
