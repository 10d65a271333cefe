"""Attention of some queries to some keys, with the log-sum-exp by which it is joined with attention to other keys.

`backward` takes the output and the log-sum-exp over all keys that a query sees. `key` and `value` may be some of them:
gradients are sums over all. Both run torch's flash kernels where there are any, and portable code elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from terrazzo.engine.runtime.device import properties
from terrazzo.engine.runtime.private_torch import FlashAttention

__all__ = ["ROWS", "Part", "Result", "VisibleKeys", "attend", "backward"]

P = ParamSpec("P")
T = TypeVar("T")
VisibleKeys = Tensor | Literal["all", "causal", "anticausal"]
"""Keys that queries see: `all`; `causal`, of as many keys those up to the query's own number; `anticausal`, those from
it on; or a bool mask `[B, 1, queries, keys]`."""

ROWS = 512
"""Queries at a time where scores are in memory."""


class Part(NamedTuple):
    """Some queries and some keys.

    Attributes:
        query: `[B, heads, queries, head_dim]`.
        key, value: `[B, kv_heads, keys, head_dim]`; neighbouring query heads share one.
        scale: of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    seen: VisibleKeys
    scale: float

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: torch's kernel for CPUs would divide by zero, and end the process."""
        return 0 in self.query.shape[:3] or self.key.shape[2] == 0

    def by_key_head(self) -> list[Part]:
        """The queries of each key head one by one, so that keys are not repeated in memory."""
        return [self._replace(query=each) for each in self.grouped(self.query)]

    def reversed(self) -> Part:
        """Queries and keys from the last to the first: what was `anticausal` is `causal`."""
        query, key, value = _reversed(self.query, self.key, self.value)
        return Part(query, key, value, "causal", self.scale)

    def grouped(self, tensor: Tensor) -> list[Tensor]:
        """A tensor `[B, heads, ...]` likewise: `[B, kv_heads, ...]` each."""
        return list(tensor.unflatten(1, (self.key.shape[1], -1)).unbind(2))


class Result(NamedTuple):
    """Outputs `[B, heads, queries, head_dim]` in the queries' dtype; log-sum-exp `[B, heads, queries]`, fp32 or fp64.

    A query that sees nothing has 0 and minus infinity.
    """

    out: Tensor
    lse: Tensor


def attend(part: Part) -> Result:
    """`softmax(q k^T scale) v` over the keys of the part."""
    if part.is_empty:
        out = part.query.new_zeros((*part.query.shape[:-1], part.value.shape[-1]))
        return Result(out, out.new_full(part.query.shape[:-1], -torch.inf, dtype=_wide(part.query)))
    if _is(part.seen, "anticausal"):
        return Result(*_reversed(*attend(part.reversed())))
    groups = [_attend(each) for each in part.by_key_head()]
    return Result(_joined([each.out for each in groups]), _joined([each.lse for each in groups]))


def backward(part: Part, grad: Tensor, whole: Result) -> tuple[Tensor, ...]:
    """Gradients of query, key and value for the share that these keys have in the outputs.

    Those of key and value are fp32 or fp64, as sums over the heads that share them.

    Args:
        grad: of the outputs.
        whole: over all keys that the queries see, each of which sees some.
    """
    if part.is_empty:
        wide = whole.lse.dtype
        return torch.zeros_like(part.query), *(torch.zeros_like(each, dtype=wide) for each in (part.key, part.value))
    if _is(part.seen, "anticausal"):
        return _reversed(*backward(part.reversed(), grad.flip(2), Result(*_reversed(*whole))))
    groups = zip(part.by_key_head(), *map(part.grouped, (grad, *whole)), strict=True)
    gradients = [_backward(each, its_grad, Result(*its_whole)) for each, its_grad, *its_whole in groups]
    wide = whole.lse.dtype
    keys, values = (functools.reduce(torch.add, (each[index].to(wide) for each in gradients)) for index in (1, 2))
    return _joined([each[0] for each in gradients]), keys, values


def _reversed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """From the last token to the first."""
    return tuple(each.flip(2) for each in tensors)


def _joined(groups: list[Tensor]) -> Tensor:
    return groups[0] if len(groups) == 1 else torch.stack(groups, dim=2).flatten(1, 2)


def _attend(part: Part) -> Result:
    query, key, value, seen, scale = part
    if _is_cpu_flash(part):
        out, lse = FlashAttention.on_cpu(
            query, key, value, 0.0, _is(seen, "causal"), attn_mask=_bias(seen, query.dtype), scale=scale
        )
        return Result(out, _without_blind(lse, seen))
    if _is_cuda_flash(part):
        outputs = FlashAttention.on_cuda(query, key, value, 0.0, _is(seen, "causal"), scale=scale)
        return Result(outputs[0], outputs[1])
    return _portable(part)


def _backward(part: Part, grad: Tensor, whole: Result) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, seen, scale = part
    if _is_cpu_flash(part):
        gradients: tuple[Tensor, Tensor, Tensor] = FlashAttention.on_cpu_backward(
            *(grad, query, key, value, *whole, 0.0, _is(seen, "causal")),
            attn_mask=_bias(seen, query.dtype),
            scale=scale,
        )
        return gradients
    if _is_cuda_flash(part):
        none, state = torch.empty(0, device=query.device), torch.zeros(2, dtype=torch.uint64, device=query.device)
        lse = whole.lse.contiguous()  # the kernel takes no note of strides, and a tile's are those of the sequence
        of_kernel = FlashAttention.on_cuda_backward(
            *(grad, query, key, value, whole.out, lse, none, none, query.shape[2], key.shape[2]),
            *(0.0, _is(seen, "causal"), state, none),
            scale=scale,
        )
        return of_kernel[0], of_kernel[1], of_kernel[2]
    return _portable_backward(part, grad, whole)


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype of its log-sum-exp: fp32, or fp64 where it is."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _is(seen: VisibleKeys, kind: str) -> bool:
    return isinstance(seen, str) and seen == kind


def _is_cpu_flash(part: Part) -> bool:
    return part.query.device.type == "cpu" and part.query.shape[-1] == part.value.shape[-1]


def _is_cuda_flash(part: Part) -> bool:
    """Whether torch's kernel for GPUs takes it: 16 bits, no mask, Ampere or later."""
    size, dtype, device = part.query.shape[-1], part.query.dtype, part.query.device
    fits = dtype in (torch.float16, torch.bfloat16) and size == part.value.shape[-1] and size % 8 == 0 and size <= 256
    return device.type == "cuda" and isinstance(part.seen, str) and fits and _is_ampere_or_later(device)


@functools.cache
def _is_ampere_or_later(device: torch.device) -> bool:
    """Torch's flash attention raises on GPUs before (`sm80` in `aten/native/transformers/cuda/sdp_utils.cpp`)."""
    return bool(properties(device.index).major >= 8)


def _bias(seen: VisibleKeys, dtype: torch.dtype) -> Tensor | None:
    """What is added to scores: minus infinity where a mask has False."""
    if isinstance(seen, str):
        return None
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def _without_blind(lse: Tensor, seen: VisibleKeys) -> Tensor:
    """The kernel says 0 of a query that sees nothing. Not in place: selective checkpointing may keep its result."""
    return lse if isinstance(seen, str) else lse.masked_fill(~seen.any(dim=-1), -torch.inf)


def _outside_autocast(compute: Callable[Concatenate[Part, P], T]) -> Callable[Concatenate[Part, P], T]:
    """Have a function compute in the dtypes that it names, also where backward runs inside of `torch.autocast`."""

    @functools.wraps(compute)
    def computed(part: Part, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with torch.autocast(part.query.device.type, enabled=False):
            return compute(part, *args, **kwargs)

    return computed


def _scores(part: Part, first: int) -> Tensor:
    """The scores of the `ROWS` queries from `first` on, in fp32 or fp64: minus infinity where nothing is seen."""
    query = part.query[:, :, first : first + ROWS]
    wide = _wide(query)
    scores = query.to(wide) @ part.key.to(wide).mT * part.scale
    if isinstance(part.seen, Tensor):
        return scores.masked_fill_(~part.seen[:, :, first : first + ROWS], -torch.inf)
    if _is(part.seen, "causal"):
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(ones.triu(first + 1), -torch.inf)
    return scores


@_outside_autocast
def _portable(part: Part) -> Result:
    outs, lses = [], []
    for first in range(0, part.query.shape[2], ROWS):
        scores = _scores(part, first)
        lse = scores.logsumexp(dim=-1)
        weights = (scores - lse.unsqueeze(-1)).exp_().masked_fill_(lse.isneginf().unsqueeze(-1), 0.0)
        outs.append((weights @ part.value.to(weights.dtype)).to(part.query.dtype))
        lses.append(lse)
    return Result(torch.cat(outs, dim=2), torch.cat(lses, dim=2))


@_outside_autocast
def _portable_backward(part: Part, grad: Tensor, whole: Result) -> tuple[Tensor, Tensor, Tensor]:
    wide = whole.lse.dtype
    key, value = part.key.to(wide), part.value.to(wide)
    queries, keys, values = [], torch.zeros_like(key), torch.zeros_like(value)
    for first in range(0, part.query.shape[2], ROWS):
        query, its_grad, out, lse = (each[:, :, first : first + ROWS] for each in (part.query, grad, *whole))
        its_grad = its_grad.to(wide)
        weights = (_scores(part, first) - lse.unsqueeze(-1)).exp_()
        values += weights.mT @ its_grad
        inner = its_grad @ value.mT - (its_grad * out.to(wide)).sum(dim=-1, keepdim=True)
        weights *= inner.mul_(part.scale)
        queries.append((weights @ key).to(query.dtype))
        keys += weights.mT @ query.to(wide)
    return torch.cat(queries, dim=2), keys, values
