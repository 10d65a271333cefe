"""What is done on the first rank alone, such as a warning that would else come once per rank."""

from __future__ import annotations

import torch.distributed as dist

from terrazzo.messages import warn

__all__ = ["is_first", "warn_once"]

_WARNED: set[str] = set()


def is_first() -> bool:
    """Whether this is rank 0, or there are no ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def warn_once(text: str) -> None:
    """A warning on rank 0, the first time."""
    if is_first() and text not in _WARNED:
        _WARNED.add(text)
        warn(text)
