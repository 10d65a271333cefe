"""Learning-rate schedules as torch `LambdaLR`, so that any optimizer and any checkpoint understands them.

A schedule is a share of the peak rate at a step. Steps are optimizer steps, counted from 0. Warm-up is linear and its
first step already learns: share 1/warmup_steps at step 0. Cosine decay is Loshchilov & Hutter 2017 (arXiv:1608.03983)
without restarts; warm-up-stable-decay is Hu et al. 2024 (arXiv:2404.06395).
"""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from terrazzo.config import ScheduleConfig

__all__ = ["build_schedule", "learning_rate_share"]


def learning_rate_share(config: ScheduleConfig, steps: int, step: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of a run of `steps`, as a share of the peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    start = config.warmup_steps
    if config.name == "wsd":
        start = max(start, steps - (config.decay_steps or max(1, steps // 5)))
    if config.name == "constant" or step < start:
        return 1.0
    # The last step (steps - 1) gets exactly the final share; later ones, if any, keep it.
    progress = min(1.0, (step - start) / max(1, steps - 1 - start))
    remaining = (1 + math.cos(math.pi * progress)) / 2 if config.name == "cosine" else 1 - progress
    return config.final_fraction + (1 - config.final_fraction) * remaining


def build_schedule(config: ScheduleConfig, steps: int, optimizer: Optimizer) -> LambdaLR:
    """A torch scheduler over every parameter group of `optimizer`; call its `step()` after each optimizer step."""
    return LambdaLR(optimizer, partial(learning_rate_share, config, steps))
