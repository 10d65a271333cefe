"""What a module was called with: the tensor of activations that ranks exchange, and others that need gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.runtime.private_torch import tree_leaves
from terrazzo.errors import Misuse

__all__ = ["first_activation", "others_with_gradients", "with_first_changed"]


def first_activation(args: Any, kwargs: Any) -> Tensor | None:
    """The first floating-point tensor of two dims or more: the one that `with_first_changed` changes."""
    return next((value for value in (*args, *kwargs.values()) if _is_activation(value)), None)


def with_first_changed(module: nn.Module, args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments and keyword arguments in which `change` has replaced the first activation.

    Raises:
        Misuse: there is none.
    """
    for number, value in enumerate(args):
        if _is_activation(value):
            return (*args[:number], change(value), *args[number + 1 :]), kwargs
    for name, value in kwargs.items():
        if _is_activation(value):
            return args, {**kwargs, name: change(value)}
    raise Misuse(
        f"A {type(module).__name__} that tz.parallelize has cut was called without a tensor of activations: its first "
        "one of floating-point numbers, of two dims or more, is what ranks exchange."
    )


def others_with_gradients(values: Any, first: Tensor | None) -> list[Tensor]:
    """The tensors in nested `values` that a backward will go through, without `first`."""
    if not torch.is_grad_enabled():
        return []
    leaves = tree_leaves(values)
    return [each for each in leaves if isinstance(each, Tensor) and each is not first and each.requires_grad]


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
