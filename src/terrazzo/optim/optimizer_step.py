"""What the optimizers' `step` methods share: the type of a param group, and the closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ParamGroup", "loss_of"]

ParamGroup = dict[str, Any]
"""A param group: its `params`, its own settings, and whatever else a user keeps in it."""


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss that a step's closure returns, called with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
