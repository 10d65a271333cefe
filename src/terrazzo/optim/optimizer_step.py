"""What every optimizer here has: what a param group is, and the loss that a step's closure gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ParamGroup", "loss_of"]

ParamGroup = dict[str, Any]
"""A param group: its `params`, its own settings, and whatever else a user keeps in it."""


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of a step gives, with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
