"""What the optimizers share: the type of a param group, a step's closure, and which parameters none of them steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from terrazzo.errors import BadInput

__all__ = ["ParamGroup", "loss_of", "refuse_complex", "refuse_sparse"]

ParamGroup = dict[str, Any]
"""A param group: its `params`, its own settings, and whatever else a user keeps in it."""


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss that a step's closure returns, called with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_complex(optimizer: Optimizer, param_group: ParamGroup) -> None:
    """Raise `BadInput` if a group that is to be added has complex parameters, whose imaginary part would be dropped."""
    given = param_group["params"]
    if isinstance(given, torch.Tensor):
        return refuse_complex(optimizer, {"params": [given]})
    if isinstance(given, set):
        return None  # torch refuses it, as it does all that is no tensor
    param_group["params"] = given = list(given)  # it may be a generator
    named = (each if isinstance(each, tuple) else (None, each) for each in given)
    for name, parameter in named:
        if isinstance(parameter, torch.Tensor) and parameter.is_complex():
            what = f"of {parameter.dtype}" if name is None else f"{name!r} of {parameter.dtype}"
            raise BadInput(
                f"tz.optim.{type(optimizer).__name__} was given a parameter {what}, and steps real numbers: train"
                " torch.view_as_real of its values as the parameter, or take torch.optim.AdamW for it."
            )
    return None


def refuse_sparse(optimizer: Optimizer) -> None:
    """Raise `BadInput` if a parameter has a sparse gradient, before anything is changed."""
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    if any(gradient is not None and gradient.is_sparse for gradient in gradients):
        raise BadInput(
            f"tz.optim.{type(optimizer).__name__} was given a sparse gradient, which it does not step: build the"
            " embedding with sparse=False."
        )
