"""The optimizers of a sharded model as a checkpoint has them: one list of param groups, whoever steps them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from terrazzo.engine import ShardedOptimizer, engine_of
from terrazzo.errors import BadInput

__all__ = ["Optimizers", "check_optimizers", "optimizer_name", "presence", "scaler_of"]

Optimizers = Optimizer | Sequence[Optimizer] | None
"""The model's optimizer, all of them where it has several, or None for the weights alone."""


def check_optimizers(model: torch.nn.Module, optimizer: Optimizers) -> None:
    """Raises: `BadInput` unless these are the optimizers that step the model, in any order."""
    if optimizer is None:
        return
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    engine = engine_of(model)
    engine.drivers.drop_gone(optimizers)
    own = engine.optimizers
    if {id(each) for each in optimizers} != {id(each) for each in own}:
        raise BadInput(
            f"A checkpoint of this {type(model).__name__} was asked for with {_named(optimizers)}, and what steps it"
            f" is {_named(own)}. Give all of its optimizers, as tz.shard and tz.attach returned them, or None for the "
            "weights alone."
        )


def presence(optimizer: Optimizers) -> str:
    """Whether there is any, in words that ranks compare."""
    return "None" if optimizer is None else "given"


def optimizer_name(model: torch.nn.Module) -> str:
    """The class; where there are several, those of all."""
    return " + ".join(sorted(type(each).__name__ for each in engine_of(model).optimizers))


def scaler_of(model: torch.nn.Module) -> ShardedOptimizer | None:
    """What has the loss scaler, if there is one: with several optimizers there is none."""
    first = engine_of(model).optimizer
    return first if isinstance(first, ShardedOptimizer) else None


def _named(optimizers: Sequence[object]) -> str:
    return f"[{', '.join(f'{type(each).__name__} at {id(each):#x}' for each in optimizers)}]"
