"""`deepspeed.utils`: logging, and a loader without an end."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import torch.distributed as dist

from terrazzo.integrations.deepspeed.runtime.dataloader import RepeatingLoader

__all__ = ["RepeatingLoader", "is_first", "log_dist", "logger", "warn_once"]

logger = logging.getLogger("terrazzo.deepspeed")


def is_first() -> bool:
    """Whether this is rank 0, or there are no ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks; default and -1: on all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


_WARNED: set[str] = set()


def warn_once(text: str) -> None:
    """A warning on rank 0, the first time."""
    if is_first() and text not in _WARNED:
        _WARNED.add(text)
        warnings.warn(text, UserWarning, stacklevel=2)
