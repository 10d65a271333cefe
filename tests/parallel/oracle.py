"""The built-in decoder on several tensor-parallel ranks, in one process of plain PyTorch.

Matrices are cut into chunks, one for each rank, and partial sums are added in rank order. A parameter that all ranks
have whole is one leaf for each of them, so that what it gets on each can be added in the engine's order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from terrazzo.train.model.decoder import DecoderConfig

Leaves = dict[str, list[Tensor]]
"""By name of a parameter, each rank's part of it, or copy."""


def add(parts: Sequence[Tensor]) -> Tensor:
    """((p0 + p1) + p2) + ..."""
    return functools.reduce(torch.add, parts)


class _Fan(torch.autograd.Function):
    """One tensor for several ranks, whose gradients are added in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(x.clone() for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return add(grads), None


class _Sum(torch.autograd.Function):
    """The sum in rank order; each has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.count = len(parts)
        return add(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0],) * ctx.count


class _Join(torch.autograd.Function):
    """Parts along a dim; each has its own part of the gradient, in memory of its own."""

    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [part.shape[dim] for part in parts]
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(part.contiguous() for part in grads[0].split(ctx.sizes, ctx.dim))


class _Split(torch.autograd.Function):
    """The reverse of `_Join`, into equal parts."""

    @staticmethod
    def forward(ctx: Any, dim: int, count: int, whole: Tensor) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return tuple(part.contiguous() for part in whole.chunk(count, dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, torch.cat(grads, ctx.dim)


def chunks(numel: int, parts: int) -> list[slice]:
    return [slice(numel * part // parts, numel * (part + 1) // parts) for part in range(parts)]


def cut_dim(name: str, config: DecoderConfig, tp: int) -> int | None:
    """Along which dim a parameter of the decoder is cut; None for one that all ranks have whole."""
    if name.endswith(("key.weight", "value.weight")) and config.kv_heads < tp:
        return None
    if name.endswith(("query.weight", "key.weight", "value.weight", "gate.weight", "up.weight")):
        return 0
    if name.endswith(("output.weight", "down.weight")):
        return 1
    return 0 if name in ("embedding.weight", "head.weight") else None


def parts_of(name: str, whole: Tensor, config: DecoderConfig, tp: int) -> list[Tensor]:
    """Each rank's part of a parameter, or a copy."""
    dim = cut_dim(name, config, tp)
    if dim is None:
        return [whole.clone() for _ in range(tp)]
    return [whole.narrow(dim, run.start, run.stop - run.start).clone() for run in chunks(whole.shape[dim], tp)]


class ChunkedDecoder:
    """Computes one data rank's loss as the ranks of one tensor-parallel group do.

    Attributes:
        leaves: of the weights, to be differentiated.
    """

    def __init__(self, weights: dict[str, Tensor], config: DecoderConfig, tp: int, sequence: bool) -> None:
        self.config, self.tp, self.sequence = config, tp, sequence
        self.leaves: Leaves = {
            name: [part.requires_grad_() for part in parts_of(name, whole.detach(), config, tp)]
            for name, whole in weights.items()
        }

    def gradients(self, tokens: Tensor) -> tuple[float, Leaves]:
        """The loss, and each rank's own gradients."""
        logits = self.logits(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        found: Leaves = {}
        for name, leaves in self.leaves.items():
            found[name] = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
        return loss.item(), found

    def logits(self, tokens: Tensor) -> Tensor:
        config, x = self.config, self._embedded(tokens)
        frequency = config.rope_theta ** (
            -torch.arange(config.head_dim // 2, dtype=torch.float64) * 2 / config.head_dim
        )
        angle = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float64), frequency)
        table = angle.cos().float(), angle.sin().float()
        parts = self._split(x)
        for block in range(config.layers):
            parts = self._attention(f"blocks.{block}.", parts, table)
            parts = self._feed_forward(f"blocks.{block}.", parts)
        x = F.rms_norm(self._join(parts), (config.dim,), self.leaves["norm.weight"][0], config.norm_eps)
        head = self.leaves.get("head.weight", self.leaves["embedding.weight"])
        logits = [F.linear(own, part) for own, part in zip(self._fan(x), head, strict=True)]
        return _Join.apply(-1, *logits)  # type: ignore[no-untyped-call, no-any-return]

    def _split(self, x: Tensor) -> Sequence[Tensor]:
        """Each rank's part of the sequence; where sequences are whole, one for all."""
        return _Split.apply(1, self.tp, x) if self.sequence else [x]  # type: ignore[no-untyped-call, no-any-return]

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return _Join.apply(1, *parts) if self.sequence else parts[0]  # type: ignore[no-untyped-call, no-any-return]

    def _entered(self, norm: str, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """What each rank's matrices are given: the whole input, of which each part was normed by its rank's copy."""
        shape, eps = (self.config.dim,), self.config.norm_eps
        normed = [F.rms_norm(part, shape, own, eps) for part, own in zip(parts, self.leaves[norm], strict=False)]
        return self._fan(self._join(normed))

    def _added(self, parts: Sequence[Tensor], sums: Sequence[Tensor]) -> Sequence[Tensor]:
        total = self._split(_Sum.apply(*sums))  # type: ignore[no-untyped-call]
        return [part + more for part, more in zip(parts, total, strict=True)]

    def _fan(self, x: Tensor) -> tuple[Tensor, ...]:
        fanned: tuple[Tensor, ...] = _Fan.apply(x, self.tp)  # type: ignore[no-untyped-call]
        return fanned

    def _embedded(self, tokens: Tensor) -> Tensor:
        looked_up = []
        for run, part in zip(chunks(self.config.vocab_size, self.tp), self.leaves["embedding.weight"], strict=True):
            outside = (tokens < run.start) | (tokens >= run.stop)
            rows = F.embedding((tokens - run.start).masked_fill(outside, 0), part)
            looked_up.append(rows.masked_fill(outside.unsqueeze(-1), 0))
        return _Sum.apply(*looked_up)  # type: ignore[no-untyped-call, no-any-return]

    def _attention(self, prefix: str, parts: Sequence[Tensor], table: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
        config, sums = self.config, []
        heads, kv_heads = config.heads // self.tp, max(1, config.kv_heads // self.tp)
        for rank, own in enumerate(self._entered(f"{prefix}attention_norm.weight", parts)):
            matrices = {each: self.leaves[f"{prefix}attention.{each}.weight"][rank] for each in _ATTENTION}
            if config.kv_heads < self.tp:
                first = rank * config.kv_heads // self.tp * config.head_dim
                for each in ("key", "value"):
                    matrices[each] = matrices[each][first : first + config.head_dim]
            query, key, value = (
                F.linear(own, matrices[each]).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
                for each in ("query", "key", "value")
            )
            mixed = F.scaled_dot_product_attention(
                _turned(query, *table),
                _turned(key, *table),
                value,
                is_causal=True,
                enable_gqa=heads != kv_heads or config.heads != config.kv_heads,
            )
            sums.append(F.linear(mixed.transpose(1, 2).flatten(2), matrices["output"]))
        return self._added(parts, sums)

    def _feed_forward(self, prefix: str, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        sums = []
        for rank, own in enumerate(self._entered(f"{prefix}feed_forward_norm.weight", parts)):
            gate, up, down = (
                self.leaves[f"{prefix}feed_forward.{each}.weight"][rank] for each in ("gate", "up", "down")
            )
            sums.append(F.linear(F.silu(F.linear(own, gate)) * F.linear(own, up), down))
        return self._added(parts, sums)


_ATTENTION = ("query", "key", "value", "output")


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def finished(each: list[list[Leaves]], config: DecoderConfig, tp: int, sequence: bool) -> Leaves:
    """What each rank's optimizer sees, from gradients [micro-batch][data rank]: micro-batches, then data, then tp.

    Micro-batches are added up first, and the sum is divided by the number of data ranks.
    """
    ranks, names = len(each[0]), each[0][0].keys()
    sums = {
        name: [add([add([micro[rank][name][t] for micro in each]) for rank in range(ranks)]) for t in range(tp)]
        for name in names
    }
    for name, parts in sums.items():
        if cut_dim(name, config, tp) is None:
            partial = (sequence and "norm.weight" in name and name != "norm.weight") or "attention." in name
            sums[name] = [add(parts) if partial else parts[0]] * tp
    return {name: [part / ranks for part in parts] for name, parts in sums.items()}
