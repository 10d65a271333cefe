"""The global norm of finished gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from terrazzo.engine.bucket import Bucket
from terrazzo.engine.gradient import Gradient
from terrazzo.engine.recipe import Recipe
from terrazzo.errors import Diverged

__all__ = ["clip_grad_norm", "stacked"]


def clip_grad_norm(
    buckets: Iterable[Bucket], recipe: Recipe, max_norm: float, norm_type: float, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale every finished gradient by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does.

    Raises: `Diverged`, with nothing scaled, for a norm that is not finite if `error_if_nonfinite`.
    """
    axes, split = recipe.axes, recipe.plan.optim.axes
    gradients = [bucket.gradient for bucket in buckets if bucket.gradient.finished is not None]
    local = [_norm(gradient, norm_type) for gradient in gradients]
    norms = stacked(local, axes.device) if local else torch.zeros(1, dtype=torch.float64, device=axes.device)
    if norm_type == float("inf"):
        total = axes.total(norms.max(), split, reduce=torch.amax)
    else:
        total = axes.total((norms**norm_type).sum(), split) ** (1 / norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise Diverged(
            f"The total norm of order {norm_type:g} of the gradients is {float(total)}, so they cannot be clipped. "
            "Lower the learning rate, or leave out error_if_nonfinite to scale them all the same."
        )
    if max_norm != float("inf"):
        coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.scale(coefficient)
    return total.float()


def _norm(gradient: Gradient, norm_type: float) -> Tensor:
    grad = gradient.whole()
    assert grad is not None
    dtype = torch.promote_types(grad.dtype, torch.float32)  # 16 bits can neither hold nor sum the squares of gradients
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=dtype).double()
    return norm


def stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """0-d tensors as one of [len(values)] on `device`; what lies on the host gets there in one copy, and comes last."""
    parts = ([value for value in values if (value.device == device) is there] for there in (True, False))
    return torch.cat([torch.stack(part).to(device) for part in parts if part])
