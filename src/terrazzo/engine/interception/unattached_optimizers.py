"""Optimizers that step over the parameters of a sharded model without being attached to it.

Such a step would read gradients that are not there, and train nothing. A hook on every optimizer of the process looks
at what it steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from terrazzo.engine.buckets.parameters.note import sharded_name
from terrazzo.engine.interception.sharded_optimizer import ShardedOptimizer
from terrazzo.errors import Misuse
from terrazzo.messages import listed

__all__ = ["on_unattached_step"]

_CALLBACKS: list[Callable[[Optimizer], None]] = []


def on_unattached_step(callback: Callable[[Optimizer], None]) -> None:
    """Call `callback` with every optimizer that is not attached as it begins a step, so that it may attach it."""
    if callback not in _CALLBACKS:
        _CALLBACKS.append(callback)


def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, ShardedOptimizer):
        return
    for callback in _CALLBACKS:
        callback(optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        return
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = [name for parameter in stepped if (name := sharded_name(parameter)) is not None]
    if names:
        raise Misuse(
            f"This {type(optimizer).__name__} steps parameters of a sharded model ({listed(names, 1)}), and "
            "is not attached to it: their gradients are not there for it. Give it to tz.shard, or call "
            "tz.attach(model, optimizer) before its first step."
        )


# Registered once, with the import of `terrazzo.engine`, and not at the first shard: torch goes through these hooks
# without a lock, and another thread may be in a step.
register_optimizer_step_pre_hook(_before_any_step)
