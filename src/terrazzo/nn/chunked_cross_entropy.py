"""The loss of a language model's head without its logits: matrix product and cross-entropy, chunk by chunk of tokens.

With `z = x Wᵀ`, capped as `z = c tanh(x Wᵀ / c)`, `l = log Σ exp z`, a target `t`, label smoothing `ε` over a
vocabulary of `V`, a z-loss of weight `λ` (PaLM, arXiv 2204.02311, section 5) and a weight `w` of each token,

    loss = Σ w (l - (1 - ε) z_t - (ε / V) Σ z + λ l²)
    dz   = w (softmax(z) (1 + 2 λ l) - (1 - ε) 1_t - ε / V) (1 - z² / c²)

so the gradients of `x` and `W` are formed in the forward pass, while a chunk's logits are there, and are multiplied by
the loss's own gradient in backward. That is one number for a sum; for losses token by token it would not be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_count, is_number
from terrazzo.nn.single_backward import check_no_graph
from terrazzo.nn.vocabulary_parts import VocabularyParts, places_in_part, softmax_terms

__all__ = ["MANY_LOGITS", "PRODUCT_NUMEL", "chunk_rows", "linear_cross_entropy"]

CHUNKS = 32
"""Into how many a large batch is cut, so that what a chunk needs is far below what all logits would."""
LEAST_ROWS, LEAST_LOGITS = 128, 1 << 20
"""The least rows and logits of a chunk: what is smaller is slow, and saves nothing."""
MOST_LOGITS = 1 << 26
"""The most logits of a chunk, whatever the batch: 256 MiB in fp32."""


PRODUCT_NUMEL = 1 << 24
"""Elements of the part of the weight's gradient that is computed at a time, beside the sum of all chunks'."""
MANY_LOGITS = 1 << 24
"""From so many on it is worth having no logits at all: 64 MiB in fp32."""


def chunk_rows(tokens: int, vocabulary: int) -> int:
    """Tokens of a chunk of `tokens` with so many logits each, by default: a power of two.

    It depends on nothing else: chunks are the same on any number of ranks along `tp`, which all have the same tokens.
    """
    rows = max(LEAST_ROWS, LEAST_LOGITS // vocabulary, min(tokens // CHUNKS, MOST_LOGITS // vocabulary))
    return 1 << (rows.bit_length() - 1)


def linear_cross_entropy(  # structure: signature fixed by torch's cross_entropy
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    token_weights: Tensor | None = None,
    rows: int | None = None,
    parts: VocabularyParts | None = None,
) -> Tensor:
    """The sum over tokens of the cross-entropy of `hidden @ weight.T`, 0-d fp32, which never has all logits at once.

    `F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")` but for rounding: products are in the
    dtype of `hidden`, or under `torch.autocast` in its dtype, all else is in fp32, and so is the sum of the weight's
    gradient over chunks. Differentiable once.

    Memory, beside the gradients of `hidden` and, in fp32, of `weight`: some three times the logits of a chunk.

    Args:
        hidden: what the head is given, `[..., dim]`; fp32, bf16, or fp64, which all is in then.
        weight: of the head, `[vocabulary, dim]`, of the same dtype but under autocast.
        targets: int64, of the shape before `dim`.
        ignore_index: the target of tokens that do not count.
        label_smoothing: probability that is spread over the vocabulary, as in `F.cross_entropy`.
        z_loss: weight of the squared logarithm of the softmax's denominator, which is added.
        softcap: logits are kept within it on either side, by tanh (Gemma 2, arXiv 2408.00118, section 2).
        token_weights: what each token's loss is multiplied by, of the shape of `targets`, without a gradient; for a
            mean, one over the number of tokens on all ranks.
        rows: tokens of a chunk; default `chunk_rows`.
        parts: the ranks that `weight` is spread over. Collective then, with the same `hidden` and result on each; its
            gradient is what this rank's part adds to it.

    Raises:
        BadInput: shapes or dtypes that do not go together; fp16, whose gradients would be rounded to zero, as they are
            formed before the loss scale is known; numbers outside of their range.
        Misuse: in backward, where a gradient is taken with `create_graph=True`.
        RuntimeError: from torch, for a target outside of the vocabulary.
    """
    loss = _Loss(parts.vocabulary if parts else weight.shape[0], label_smoothing, z_loss, softcap, parts)
    loss.check()
    _check_targets(targets, ignore_index)
    hidden, weight = _as_autocast(hidden, weight)
    _check_tensors(hidden, weight, targets, token_weights)
    if rows is not None and not is_count(rows):
        raise BadInput(f"linear_cross_entropy: rows is {rows}; a chunk has a whole number of tokens, 1 or more.")
    flat = targets.flatten()
    ignored = flat == ignore_index
    tokens = _Tokens(
        flat.masked_fill(ignored, 0), ~ignored, token_weights, rows or chunk_rows(flat.numel(), loss.vocabulary)
    )
    learns = torch.is_grad_enabled() and (hidden.requires_grad, weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):  # which would change the dtype of chunks' products
        total: Tensor = _SummedLoss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), weight, tokens, loss, learns or (False, False)
        )
    return total


def _as_autocast(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in autocast's dtype where it is on, as `F.linear` has them; it leaves fp64 alone."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden, weight
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype)


@dataclass(frozen=True)
class _Tokens:
    """For each token, `[N]`: its target, 0 where it does not count; whether it counts; its weight if it has one.

    Attributes:
        rows: of a chunk.
    """

    targets: Tensor
    count: Tensor
    weights: Tensor | None
    rows: int

    def scale(self, dtype: torch.dtype) -> Tensor:
        """What each token's loss is multiplied by."""
        if self.weights is None:
            return self.count.to(dtype)
        return self.weights.flatten().to(dtype).masked_fill(~self.count, 0)


@dataclass(frozen=True)
class _Loss:
    """The loss of a chunk's logits, and their gradient."""

    vocabulary: int
    smoothing: float
    z_loss: float
    softcap: float | None
    parts: VocabularyParts | None

    def check(self) -> None:
        """Raise `BadInput` for a number outside of its range."""
        for name, value, fine, range_ in (
            ("label_smoothing", self.smoothing, _is_within(self.smoothing, 0, 1), "at least 0 and below 1"),
            ("z_loss", self.z_loss, _is_within(self.z_loss, 0, math.inf), "at least 0"),
            (
                "softcap",
                self.softcap,
                self.softcap is None or _is_within(self.softcap, _TINY, math.inf),
                "above 0, or None",
            ),
        ):
            if not fine:
                raise BadInput(f"linear_cross_entropy: {name} is {value!r}; it must be a number, {range_}.")

    def __call__(self, logits: Tensor, targets: Tensor, scale: Tensor, learns: bool) -> tuple[Tensor, Tensor | None]:
        """The weighted loss of each token, and the gradient of `logits`, `[rows, part of the vocabulary]`."""
        wide = logits.to(scale.dtype, copy=True)
        if self.softcap is not None:
            wide.div_(self.softcap).tanh_().mul_(self.softcap)
        slope = None if self.softcap is None or not learns else 1 - (wide / self.softcap).square_()
        places, elsewhere = self._places(targets, wide.shape[-1])
        terms = softmax_terms(wide, places, elsewhere, self.parts, with_spread=bool(self.smoothing))
        log = terms.highest + terms.total.log()
        losses = log - (1 - self.smoothing) * terms.chosen
        if terms.spread is not None:
            losses = losses - self.smoothing / self.vocabulary * terms.spread
        losses = torch.where(scale != 0, scale * (losses + self.z_loss * log * log), 0)
        if not learns:
            return losses, None
        grad = terms.exponentials.mul_((scale * (1 + 2 * self.z_loss * log) / terms.total).unsqueeze(-1))
        if self.smoothing:
            grad.sub_((scale * (self.smoothing / self.vocabulary)).unsqueeze(-1))
        of_target = ((self.smoothing - 1) * scale).masked_fill(elsewhere, 0)
        grad.scatter_add_(-1, places.unsqueeze(-1), of_target.unsqueeze(-1))
        return losses, (grad if slope is None else grad.mul_(slope)).to(logits.dtype)

    def _places(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The targets' places in this rank's part, and which of them are not there."""
        if self.parts is None:
            return targets, torch.zeros_like(targets, dtype=torch.bool)
        return places_in_part(targets, self.parts.start, self.parts.start + width, self.vocabulary)


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: _Tokens, loss: _Loss, learns: tuple[bool, bool]
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        scale = tokens.scale(wide)
        losses = torch.empty_like(scale)
        of_hidden = torch.empty_like(hidden) if learns[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if learns[1] else None
        for start in range(0, len(scale), tokens.rows):
            part = slice(start, start + tokens.rows)
            losses[part], grad = loss(hidden[part] @ weight.T, tokens.targets[part], scale[part], any(learns))
            if of_hidden is not None and grad is not None:
                torch.mm(grad, weight, out=of_hidden[part])
            if of_weight is not None and grad is not None:
                _add_product(of_weight, grad.T, hidden[part])
            del grad  # before the next chunk's logits are made
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.dtype = weight.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_no_graph("linear_cross_entropy", "compute logits, and torch's cross_entropy of them")
        of_hidden, of_weight = ctx.saved_tensors
        if of_hidden is not None:
            of_hidden = torch.mul(of_hidden, grad, out=torch.empty_like(of_hidden))
        if of_weight is not None:
            of_weight = torch.mul(of_weight, grad, out=torch.empty_like(of_weight, dtype=ctx.dtype))
        return of_hidden, of_weight, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a chunk's product, not rounded to a narrower dtype before where torch can; block by block of rows then."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    rows = max(1, PRODUCT_NUMEL // total.shape[1])
    for sums, factors in zip(total.split(rows), left.split(rows), strict=True):
        sums += torch.mm(factors, right, out_dtype=total.dtype) if left.is_cuda else factors @ right


def _is_within(value: object, least: float, below: float) -> bool:
    return is_number(value) and least <= value < below


_TINY = math.ulp(0.0)
"""The least number above 0."""


def _check_targets(targets: object, ignore_index: object) -> None:
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64:
        what = (
            f"targets of {targets.dtype}" if isinstance(targets, Tensor) else f"a {type(targets).__name__} as targets"
        )
        raise BadInput(
            f"linear_cross_entropy was given {what}: it takes a tensor of tokens' numbers, int64; probabilities of "
            "tokens need logits, and torch's cross_entropy of them."
        )
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise BadInput(
            f"linear_cross_entropy: ignore_index is {ignore_index!r}; it must be a whole number, below 0 where all "
            "tokens count."
        )


def _check_tensors(hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None) -> None:
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise BadInput(
            f"linear_cross_entropy was given {hidden.dtype} times {weight.dtype}: it takes two of fp32, of bf16 or of "
            "fp64. Gradients of fp16 are formed before its loss scale is known: compute logits, and "
            "torch's cross_entropy of them."
        )
    if weight.dim() != 2 or 0 in weight.shape[:1] or hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        raise BadInput(
            f"linear_cross_entropy was given hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}: it takes "
            "[..., dim] and [vocabulary, dim], of one token of the vocabulary or more."
        )
    for name, each in (("targets", targets), ("token_weights", token_weights)):
        if each is not None and each.shape != hidden.shape[:-1]:
            raise BadInput(
                f"linear_cross_entropy was given {name} of shape {tuple(each.shape)}: it takes that of hidden "
                f"without its last dimension, {tuple(hidden.shape[:-1])}."
            )
    if token_weights is not None and token_weights.requires_grad and torch.is_grad_enabled():
        raise BadInput(
            "linear_cross_entropy was given token_weights that require a gradient, and forms none of them: pass "
            "token_weights.detach(), or compute logits, and torch's cross_entropy of them."
        )
