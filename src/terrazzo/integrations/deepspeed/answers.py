"""What a script may ask the engine about its configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from terrazzo.errors import BadInput
from terrazzo.integrations.deepspeed.requested import Configuration

__all__ = ["Answers"]


class Answers:
    """Mixed into the engine."""

    configuration: Configuration
    optimizer: Optimizer | None
    world_size: int
    _accumulation: int

    def train_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self._accumulation * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.configuration.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three sizes above, in their order."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of micro-batches per step. Raises: `BadInput` where it does not come out whole."""
        at_once = self.train_micro_batch_size_per_gpu() * self.world_size
        if train_batch_size <= 0 or train_batch_size % at_once:
            raise BadInput(
                f"set_train_batch_size({train_batch_size}): it must be a multiple of micro-batch × ranks = {at_once}."
            )
        self._accumulation = train_batch_size // at_once

    def bfloat16_enabled(self) -> bool:
        return self.configuration.setup.precision.compute is torch.bfloat16

    def fp16_enabled(self) -> bool:
        return self.configuration.setup.precision.compute is torch.float16

    def loss_scale(self) -> float:
        """fp16's present scale; else 1."""
        return float(getattr(self.optimizer, "loss_scale", 1.0))

    def gradient_clipping(self) -> float:
        """The largest norm; 0 for none."""
        return self.configuration.setup.clip or 0.0

    def zero_optimization(self) -> bool:
        return self.configuration.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.configuration.stage

    def optimizer_name(self) -> str | None:
        """The JSON's word for it, in lower case, else its class; None without one."""
        named = self.configuration.get("optimizer.type")
        if self.optimizer is None and not named:
            return None
        return str(named or type(self.optimizer).__name__).lower()

    def get_lr(self) -> list[float]:
        """The rate of each param group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Momentum of each param group, or Adam's betas."""
        return self._of_groups("momentum") or self._of_groups("betas")

    def _of_groups(self, name: str) -> list[Any]:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group[name] for group in groups if name in group]
