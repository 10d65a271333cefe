"""Whose an optimizer is, where models and optimizers are handed over apart from each other."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from terrazzo.errors import BadInput

__all__ = ["owner_of"]


def owner_of(optimizer: Optimizer, models: Iterable[nn.Module], which: str, edit: str) -> nn.Module:
    """The one model that has parameters of `optimizer`.

    Args:
        which: what the models are, for the error, and `edit` what mends it.

    Raises:
        BadInput: it is none of them, or several.
    """
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    owners = [model for model in models if not own.isdisjoint(model.parameters())]
    if len(owners) != 1:
        raise BadInput(
            f"{type(optimizer).__name__} has parameters of {len(owners)} {which}, and it must be of one: {edit}."
        )
    return owners[0]
