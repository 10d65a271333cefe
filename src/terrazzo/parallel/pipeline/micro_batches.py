"""The micro-batches of a step, and the model and the loss function as they are called with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from terrazzo.errors import BadInput

__all__ = ["Auxiliary", "LossFunction", "MicroBatch", "called", "one_loss"]

MicroBatch = tuple[Any, Any]
"""A model's inputs, and the targets that the loss function compares outputs with."""
LossFunction = Callable[[Any, Any], Tensor]
"""Is called with outputs and targets, and returns a 0-d loss."""
Auxiliary = Callable[[nn.Module], Tensor | None]
"""Is called with a module after its forward, and returns the losses that modules inside it have computed, or None."""


def called(model: nn.Module, inputs: Any) -> Any:
    """A model's outputs for the inputs of a micro-batch: one value, several, or keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def one_loss(loss: Any) -> Tensor:
    """What `loss_fn` returned, if it is a 0-d tensor.

    Raises:
        BadInput: it is not.
    """
    if not isinstance(loss, Tensor) or loss.dim():
        returned = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise BadInput(
            f"loss_fn returned {returned} to tz.step, which adds up the losses of micro-batches: have it return one "
            "number, a 0-d tensor, as loss.sum() is."
        )
    return loss
