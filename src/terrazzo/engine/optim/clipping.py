"""Norms of finished gradients over all ranks, clipping by the global one, and whether any is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.resting.counted_once import sums_over
from terrazzo.engine.labels.label import Label, collective_call, labelled
from terrazzo.engine.labels.purposes import RUN_THE_SAME, Purpose
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import Diverged

__all__ = ["OVERFLOW_NUMEL", "clip_grad_norm", "norm_dtype", "norms", "overflowed"]

_STEPPING = collective_call("optimizer.step()", RUN_THE_SAME)


def clip_grad_norm(
    buckets: Iterable[Bucket],
    sharding: ShardingSpec,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale every finished gradient by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does.

    Returns:
        The norm before that, 0-d on the mesh's device, equal on all ranks: as of `norm_dtype`.

    Raises:
        Diverged: with nothing scaled, for a norm that is not finite if `error_if_nonfinite`.
    """
    finished = [bucket for bucket in buckets if bucket.gradient.finished.exists]
    gradients = [bucket.gradient.finished for bucket in finished]
    contributions = [(bucket.gradient.finished.contribution() for bucket in finished if bucket.counted.here)]
    total = norms(contributions, sharding, norm_type, also_over=sharding.axes.stage_axis)[0].to(norm_dtype(sharding))
    if error_if_nonfinite and not math.isfinite(total):
        raise Diverged(
            f"The total norm of order {norm_type:g} of the gradients is {float(total)}, so they cannot be clipped. "
            "Lower the learning rate, or leave out error_if_nonfinite to scale them all the same."
        )
    if max_norm != float("inf"):
        coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.scale(coefficient)
    return total


def norm_dtype(sharding: ShardingSpec) -> torch.dtype:
    """The dtype of a norm of gradients, and of the factor made of it: fp32, or fp64 where gradients are kept so."""
    return torch.promote_types(sharding.precision.accumulate, torch.float32)


def norms(
    groups: Iterable[Iterable[Tensor | None]], sharding: ShardingSpec, norm_type: float, also_over: tuple[str, ...] = ()
) -> Tensor:
    """The p-norm of each group of tensors over all ranks, fp64 [number of groups]. Collective.

    Args:
        groups: what this rank gives of each, as `FinishedGradient.contribution`, None for nothing; one after the other.
        norm_type: the p; infinity for the maximum.
        also_over: axes whose ranks give other parameters to the same groups.
    """
    axes, split = sharding.axes, (*sums_over(sharding), *also_over)
    powers = torch.stack([_power(group, norm_type, axes.device) for group in groups])
    with labelled(Label(Purpose.NORM)):
        if norm_type == float("inf"):
            return axes.total(powers, split, reduce=torch.amax)
        return axes.total(powers, split) ** (1 / norm_type)


def _power(parts: Iterable[Tensor | None], norm_type: float, device: torch.device) -> Tensor:
    """The share of `parts` in a norm, before the root is taken: 0-d fp64 on `device`; the host need not know it."""
    local = [_norm(part, norm_type) for part in parts if part is not None]
    if not local:
        return torch.zeros((), dtype=torch.float64, device=device)
    every = _stacked(local, device)
    return every.max() if norm_type == float("inf") else (every**norm_type).sum()


_ROW = 4096
"""Elements that torch sums in one go on a CPU, in their own precision: 50 million would lose 0.3 % of their norm."""


def _norm(part: Tensor, norm_type: float) -> Tensor:
    dtype = torch.promote_types(part.dtype, torch.float32)  # 16 bits can neither hold nor sum the squares of gradients
    norms_of: Any = torch.linalg.vector_norm
    if devices.is_cuda(part.device) or part.numel() <= _ROW:  # CUDA sums in a tree
        return norms_of(part, norm_type, dtype=dtype).double()  # type: ignore[no-any-return]
    whole = part.numel() // _ROW * _ROW
    parts = [norms_of(part[:whole].view(-1, _ROW), norm_type, dim=1, dtype=dtype)]
    parts += [norms_of(part[whole:], norm_type, dtype=dtype)[None]] if whole < part.numel() else []
    return norms_of(torch.cat(parts).double(), norm_type)  # type: ignore[no-any-return]


OVERFLOW_NUMEL = 1
"""int64 elements that `overflowed` exchanges over every axis."""


def overflowed(buckets: Iterable[Bucket], sharding: ShardingSpec) -> bool:
    """Whether any rank holds a finished gradient that is not finite. Collective, and the host waits for it."""
    axes, known = sharding.axes, (bucket.gradient.finished.is_finite() for bucket in buckets)
    finite = [each for each in known if each is not None]
    every = _stacked(finite, axes.device).all() if finite else torch.ones((), dtype=torch.bool, device=axes.device)
    with labelled(_STEPPING):
        return bool(axes.maximum(every.logical_not().long().view(1), axes.within_replica).item())


def _stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """0-d tensors as one of [len(values)] on `device`; what lies on the host gets there in one copy, and comes last."""
    parts = ([value for value in values if (value.device == device) is on_device] for on_device in (True, False))
    return torch.cat([torch.stack(part).to(device) for part in parts if part])
