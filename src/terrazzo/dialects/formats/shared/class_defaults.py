"""What an optimizer's class takes where nothing is said, by its signature."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from terrazzo.dialects.core.description import Setting, SettingsByPath

__all__ = ["class_defaults", "signature_defaults"]


def signature_defaults(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Rate, pair of betas, eps and weight decay by a signature, as far as it has them; without weight decay it is 0."""
    defaults = {key: each.default for key, each in parameters.items()}
    numbers = {key: float(value) for key, value in defaults.items() if isinstance(value, int | float)}
    betas = defaults.get("betas")
    pair = {"betas": betas} if isinstance(betas, tuple) and len(betas) == 2 else {}
    return {
        **pair,
        **{key: numbers[key] for key in ("lr", "eps") if key in numbers},
        "weight_decay": numbers.get("weight_decay", 0.0),
    }


def class_defaults(name: str | None) -> SettingsByPath:
    """Settings of a class of torch.optim that its caller does not give; none where torch.optim has no such class."""
    chosen = vars(torch.optim).get(name or "")
    if not isinstance(chosen, type):
        return {}
    defaults = signature_defaults(inspect.signature(chosen).parameters)
    return {f"optimizer.{key}": Setting(value, "default") for key, value in defaults.items()}
