"""`deepspeed.utils`: logging, and a loader without an end."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from terrazzo.integrations.deepspeed.absent import absent_names
from terrazzo.integrations.deepspeed.runtime.dataloader import RepeatingLoader

__all__ = ["RepeatingLoader", "log_dist", "logger"]

__getattr__ = absent_names(__name__)

logger = logging.getLogger("terrazzo.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks; default and -1: on all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)
