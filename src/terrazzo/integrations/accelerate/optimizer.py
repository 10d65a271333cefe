"""Accelerate's wrapper around an optimizer that drives a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

from terrazzo.engine import ShardedModule, ShardedOptimizer, clip_grad_norm_, engine_of

__all__ = ["SteppedOptimizer", "has_engine"]


class ClippingAccelerator(Protocol):
    """What the wrapper asks of its Accelerator: its models, and the norm that the configuration clips at."""

    _models: list[nn.Module]
    _clip: float | None


class SteppedOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper, which clips if the configuration says so, and knows of steps that fp16 has skipped."""

    def __init__(self, optimizer: Optimizer, accelerator: ClippingAccelerator) -> None:
        super().__init__(optimizer, device_placement=False)
        self.accelerator, self.clipped = accelerator, False

    def step(self, closure: Callable[[], float] | None = None) -> None:
        if not self.gradient_state.sync_gradients:
            return
        limit = self.accelerator._clip
        for model in self.accelerator._models:
            if limit is not None and not self.clipped and _drives(self.optimizer, model):
                clip_grad_norm_(model, limit)
        self.clipped = False
        skipped = self.optimizer.skipped_steps
        super().step(closure)
        self._is_overflow = self.optimizer.skipped_steps > skipped


def has_engine(each: object) -> bool:
    """Whether this is a sharded model, or an optimizer that drives one, wrapped by Accelerate or not."""
    if isinstance(each, AcceleratedOptimizer):
        each = each.optimizer
    return isinstance(each, ShardedModule | ShardedOptimizer)


def _drives(optimizer: Optimizer, model: nn.Module) -> bool:
    return has_engine(model) and engine_of(model).optimizer is optimizer
