"""The three ways in which context-parallel ranks compute attention together, as autograd functions on plain tensors.

gather   keys and values are gathered. Backward gathers them again, and sums their gradients on the ranks they are from
ulysses  each rank receives whole sequences of some heads, and sends their outputs back
ring     keys and values go around; the outputs for those of each rank are joined by log-sum-exp

Queries, keys and values are `[B, heads, tokens, head_dim]`; keys and values may have fewer heads than queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from terrazzo.nn.single_backward import check_no_graph
from terrazzo.parallel.context.attention_kernels import Result
from terrazzo.parallel.context.attention_masks import AttentionMask
from terrazzo.parallel.context.attention_tiles import Outputs, TileGradients
from terrazzo.parallel.context.chunks import Chunks, TokenRun
from terrazzo.parallel.exchanges import AxisRanks, exchange

__all__ = ["Shared", "gather_attention", "ring_attention", "ulysses_attention"]


@dataclass(frozen=True)
class Shared:
    """Sequences of `length` tokens that `ranks` share; None where one rank has them alone."""

    ranks: AxisRanks | None
    chunks: Chunks
    length: int

    @property
    def back(self) -> Shared:
        """The same, for the exchanges of backward."""
        return self if self.ranks is None else replace(self, ranks=self.ranks.back)

    def runs(self, rank: int) -> list[TokenRun]:
        """Where the tokens of a rank are."""
        return self.chunks.runs(rank, self.length)


def gather_attention(
    query: Tensor, key: Tensor, value: Tensor, shared: Shared, mask: AttentionMask, scale: float
) -> Tensor:
    """Outputs for this rank's queries, which see what `mask` says."""
    outputs: Tensor = _GatherAttention.apply(query, key, value, shared, mask, scale)  # type: ignore[no-untyped-call]
    return outputs


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, shared: Shared, mask: AttentionMask, scale: float
) -> Tensor:
    """As `gather_attention`, with keys and values of one rank in memory beside its own."""
    outputs: Tensor = _RingAttention.apply(query, key, value, shared, mask, scale)  # type: ignore[no-untyped-call]
    return outputs


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, shared: Shared, mask: AttentionMask, scale: float
) -> Tensor:
    """As `gather_attention`, where `mask` is that of whole sequences. The ranks divide the query heads.

    Key heads are repeated as far as each rank needs one for its query heads.
    """
    ranks, kv_heads = shared.chunks.ranks, key.shape[1]
    repeats = math.lcm(kv_heads, ranks) // kv_heads
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    to_heads, to_tokens = functools.partial(_to_heads, shared), functools.partial(_to_tokens, shared)
    heads_back, tokens_back = functools.partial(_to_heads, shared.back), functools.partial(_to_tokens, shared.back)
    query, key, value = (exchange(each, to_heads, tokens_back) for each in (query, key, value))
    alone = Shared(None, Chunks(1), shared.length)
    return exchange(gather_attention(query, key, value, alone, mask, scale), to_tokens, heads_back)


class _GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        query, key, value, shared, mask, scale = args
        outputs = Outputs(query, scale)
        both = _whole(torch.cat((key, value), dim=-1), shared)
        outputs.add(*_halves(both, key), mask, [TokenRun(0, 0, shared.length)])
        return _save(ctx, args, outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (query, key, value, *_), gradients = _restored(ctx, grad)
        shared: Shared = ctx.shared
        both = _whole(torch.cat((key, value), dim=-1), shared.back)
        totals = torch.zeros_like(both, dtype=gradients.of_query.dtype)
        gradients.add(_halves(both, key), _halves(totals, key), ctx.mask, [TokenRun(0, 0, shared.length)])
        del both
        if shared.ranks is not None:
            totals = shared.ranks.back.reduce_scatter(shared.chunks.by_rank(totals, dim=2), query.dtype)
        return _gradients(query, key, gradients.of_query, totals)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        query, key, value, shared, mask, scale = args
        ranks, outputs, both = shared.ranks, Outputs(query, scale), torch.cat((key, value), dim=-1)
        for step in range(ranks.size):
            arriving = ranks.send_to_next(both) if step < ranks.size - 1 else None
            outputs.add(*_halves(both, key), mask, shared.runs(_owner(ranks, step)))
            both = arriving() if arriving else both
        return _save(ctx, args, outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Keys and values go round once more, and behind them their gradients, which end where they belong."""
        (query, key, value, *_), gradients = _restored(ctx, grad)
        shared: Shared = ctx.shared
        ranks, both, totals = shared.back.ranks, torch.cat((key, value), dim=-1), None
        assert ranks is not None
        for step in range(ranks.size):
            arriving = ranks.send_to_next(both) if step < ranks.size - 1 else None
            own = torch.zeros_like(both, dtype=gradients.of_query.dtype)
            gradients.add(_halves(both, key), _halves(own, key), ctx.mask, shared.runs(_owner(ranks, step)))
            if totals is not None:
                own += totals()
            totals = ranks.send_to_next(own)
            both = arriving() if arriving else both
        assert totals is not None
        return _gradients(query, key, gradients.of_query, totals())


def _owner(ranks: AxisRanks, step: int) -> int:
    """Whose keys and values are here after so many steps."""
    return (ranks.rank - step) % ranks.size


def _whole(own: Tensor, shared: Shared) -> Tensor:
    """What all ranks have, in the order of the sequence."""
    return own if shared.ranks is None else shared.chunks.in_order(shared.ranks.all_gather(own), dim=2)


def _halves(both: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as views of a tensor that has them side by side."""
    size = key.shape[-1]
    return both[..., :size], both[..., size:]


def _save(ctx: Any, args: Sequence[Any], outputs: Outputs) -> Tensor:
    query, key, value, ctx.shared, ctx.mask, ctx.scale = args
    out, lse = outputs.take()
    ctx.save_for_backward(query, key, value, out, lse)
    return out


def _restored(ctx: Any, grad: Tensor) -> tuple[tuple[Tensor, ...], TileGradients]:
    """What `_save` has kept, and gradients to add to, as a backward begins."""
    check_no_graph(
        "Attention tile by tile", "train with such a penalty without cp, in a model whose attention is torch's own"
    )
    query, key, value, out, lse = ctx.saved_tensors
    return (query, key, value), TileGradients(grad, query, Result(out, lse), ctx.scale)


def _gradients(query: Tensor, key: Tensor, of_query: Tensor, of_both: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients as autograd wants them: for all arguments, in their dtype."""
    of_key, of_value = _halves(of_both.to(query.dtype), key)
    return of_query.to(query.dtype), of_key, of_value, None, None, None


def _to_heads(shared: Shared, tokens: Tensor) -> Tensor:
    """This rank's tokens of all heads to all tokens of its share of the heads."""
    assert shared.ranks is not None
    shares = tokens.unflatten(1, (shared.chunks.ranks, -1)).movedim(1, 0)
    return shared.chunks.in_order(shared.ranks.all_to_all(shares), dim=2)


def _to_tokens(shared: Shared, heads: Tensor) -> Tensor:
    """The inverse of `_to_heads`."""
    assert shared.ranks is not None
    parts = shared.ranks.all_to_all(shared.chunks.by_rank(heads, dim=2))
    return parts.movedim(0, 1).flatten(1, 2)
