"""Attention tile by tile: which tokens see which, and one softmax over tiles that are computed after each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.parallel.context import attention_kernels
from terrazzo.parallel.context.attention_kernels import ROWS, Part, Result, VisibleKeys
from terrazzo.parallel.context.chunks import TokenRun

__all__ = ["AttentionMask", "Outputs", "TileGradients"]


@dataclass(frozen=True)
class AttentionMask:
    """What the tokens that a rank computes see: those of their own document up to themselves.

    Attributes:
        runs: where the tokens are in the sequence, one run behind the other.
        begins: the place where each token's document begins, int64 `[B, tokens]`; None where all see the sequence from
            its start.
        bounds: the least and the greatest of `begins` in each block of `ROWS` tokens of a run, over the batch.
    """

    runs: tuple[TokenRun, ...]
    begins: Tensor | None = None
    bounds: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, runs: Sequence[TokenRun], begins: Tensor | None, host_begins: Tensor | None = None) -> AttentionMask:
        """The mask for tokens whose documents begin at `begins`, which is left out where all begin at the start.

        Args:
            host_begins: the values of `begins`, in host memory.
        """
        if begins is None or host_begins is None or not host_begins.any():
            return cls(tuple(runs))
        blocks = [host_begins[:, rows.offset : rows.offset + rows.length] for run in runs for rows in _blocks(run)]
        bounds = torch.stack([torch.stack(block.aminmax()) for block in blocks]).tolist()
        return cls(tuple(runs), begins, tuple((low, high) for low, high in bounds))

    @classmethod
    def unknown(cls, runs: Sequence[TokenRun], begins: Tensor) -> AttentionMask:
        """As `of`, where the values of `begins` are not known."""
        bounds = [(0, rows.end) for run in runs for rows in _blocks(run)]
        return cls(tuple(runs), begins, tuple(bounds))

    def tiles(self, keys: Sequence[TokenRun]) -> Iterator[tuple[slice, slice, VisibleKeys]]:
        """Queries and keys, by their offsets, of which some see some, and which; `keys` are where the keys are."""
        bounds = iter(self.bounds)
        for queries in self.runs:
            if self.begins is None:
                for run in keys:
                    yield from _causal(queries, run)
                continue
            for rows in _blocks(queries):
                low, high = next(bounds)
                for run in keys:
                    yield from self._of_documents(rows, run, low, high)

    def _of_documents(
        self, rows: TokenRun, keys: TokenRun, low: int, high: int
    ) -> Iterator[tuple[slice, slice, VisibleKeys]]:
        start, stop = max(keys.place, low), min(keys.end, rows.end)
        if start >= stop:
            return
        columns = slice(keys.offset + start - keys.place, keys.offset + stop - keys.place)
        queries = slice(rows.offset, rows.offset + rows.length)
        if high <= start and stop <= rows.place:
            yield queries, columns, "all"
            return
        assert self.begins is not None
        device = self.begins.device
        places = torch.arange(rows.place, rows.end, device=device)
        of_keys = torch.arange(start, stop, device=device)
        begins = self.begins[:, queries]
        mask = (of_keys >= begins.unsqueeze(-1)) & (of_keys <= places.unsqueeze(-1))
        yield queries, columns, mask.unsqueeze(1)


def _blocks(run: TokenRun) -> list[TokenRun]:
    """A run in pieces of at most `ROWS` tokens."""
    starts = range(0, run.length, ROWS)
    return [TokenRun(run.offset + start, run.place + start, min(ROWS, run.length - start)) for start in starts]


def _causal(queries: TokenRun, keys: TokenRun) -> Iterator[tuple[slice, slice, VisibleKeys]]:
    """All keys before the queries, and the queries themselves: no run of keys begins or ends inside of one of them."""
    rows = slice(queries.offset, queries.offset + queries.length)
    if (before := min(keys.end, queries.place) - keys.place) > 0:
        yield rows, slice(keys.offset, keys.offset + before), "all"
    if keys.place <= queries.place < keys.end:
        own = keys.offset + queries.place - keys.place
        yield rows, slice(own, own + queries.length), "causal"


class Outputs:
    """Outputs over all keys that have been added so far, and their log-sum-exp, in the precision of the latter."""

    def __init__(self, query: Tensor, scale: float) -> None:
        self.query, self.scale = query, scale
        wide = torch.promote_types(query.dtype, torch.float32)
        self._lse = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)
        self._out: Tensor | None = None

    def add(self, key: Tensor, value: Tensor, mask: AttentionMask, keys: Sequence[TokenRun]) -> None:
        """Take in keys and values, `[B, kv_heads, T, D]`, that are where `keys` says."""
        for rows, columns, seen in mask.tiles(keys):
            part = Part(self.query[:, :, rows], key[:, :, columns], value[:, :, columns], seen, self.scale)
            self._merge(rows, *attention_kernels.attend(part))

    def _merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        if self._out is None:
            shape = (*self.query.shape[:-1], out.shape[-1])
            self._out = torch.zeros(shape, dtype=self._lse.dtype, device=out.device)
        before, total = self._lse[:, :, rows], self._out[:, :, rows]
        both = torch.logaddexp(before, lse)
        # What sees nothing yet stays minus infinity, whose difference to itself is no number.
        share, other = ((each - both).exp().masked_fill_(each.isneginf(), 0.0) for each in (before, lse))
        total.mul_(share.unsqueeze(-1)).add_(out * other.unsqueeze(-1))
        before.copy_(both)

    def take(self) -> Result:
        """What has come of it."""
        assert self._out is not None
        return Result(self._out.to(self.query.dtype), self._lse)


class TileGradients:
    """Of queries, keys and values, added up tile by tile in the precision of log-sum-exp.

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
        for rows, columns, seen in mask.tiles(keys):
            part = Part(self.query[:, :, rows], key[:, :, columns], value[:, :, columns], seen, self.scale)
            whole = Result(self.whole.out[:, :, rows], self.whole.lse[:, :, rows])
            gradients = attention_kernels.backward(part, self.grad[:, :, rows], whole)
            self.of_query[:, :, rows] += gradients[0]
            totals[0][:, :, columns] += gradients[1]
            totals[1][:, :, columns] += gradients[2]
