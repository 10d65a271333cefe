"""What every integration asks of the engine, and does to a model before it shards it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from terrazzo.engine import Plan, Precision, checkpoint_activations, compile_units, shard
from terrazzo.engine.mesh.activation_axes import exchanged_along
from terrazzo.errors import BadInput
from terrazzo.integrations.shared.arguments import TerrazzoArguments
from terrazzo.integrations.shared.first_rank import is_first
from terrazzo.integrations.shared.generation import generate_together
from terrazzo.nn import float8

__all__ = ["ActivationSetup", "EngineSetup", "trained_dtype", "trained_dtypes"]

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class ActivationSetup:
    """Arguments of the engine's `checkpoint_activations`: `mode` is `none`, `full`, `selective` or `selective_half`."""

    mode: str = "none"
    every: int = 1
    ops: tuple[str, ...] | None = None
    offload: bool = False


@dataclass(frozen=True)
class EngineSetup:
    """What a configuration asks for: of `tz.shard`, of the model before that, and of the loop around it.

    Attributes:
        arguments: of `tz.shard`, with a plan and a precision. Without a mesh: all ranks on one axis.

        activation_checkpointing: of the units.
        compile: each unit's forward is compiled.
        float8: the recipe by which linear layers multiply in 8 bits, as for `tz.nn.float8`; None for none. skip: globs
            over names of those that do not; None: those outside of the blocks.

        autocast: dtype of torch.autocast, which the integration enters around the model's forward; None for none.
        clip: largest global gradient norm; None for no clipping.
        accumulation: micro-batches per optimizer step.
    """

    arguments: TerrazzoArguments
    activation_checkpointing: ActivationSetup = ActivationSetup()
    compile: bool = False
    float8: str | None = None
    skip: tuple[str, ...] | None = None
    autocast: torch.dtype | None = None
    clip: float | None = None
    accumulation: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", self.arguments.resolved())

    @property
    def plan(self) -> Plan:
        """The plan in the arguments."""
        assert isinstance(self.arguments.plan, Plan)
        return self.arguments.plan

    @property
    def precision(self) -> Precision:
        """The precision in the arguments."""
        assert isinstance(self.arguments.precision, Precision)
        return self.arguments.precision

    def overridden_by(self, arguments: TerrazzoArguments) -> Self:
        """This one where the arguments say nothing. A precision of theirs is in place of autocast, too."""
        autocast = self.autocast if arguments.precision is None else None
        return replace(self, arguments=arguments.with_defaults(self.arguments), autocast=autocast)

    def check(self, model: nn.Module) -> None:
        """Refuse a model that `tz.parallelize` has given to ranks that see the same batches.

        Other libraries deal out a batch to each rank, and arrange ranks by data axes: their groups would be others.

        Raises:
            BadInput: there, with nothing changed.
        """
        if axes := sorted(exchanged_along(model)):
            raise BadInput(
                f"The {type(model).__name__} went through tz.parallelize, so ranks along {' and '.join(axes)} have to "
                "see the same batches, and here each rank is data parallel. Shard it in a loop of your own, by "
                "tz.shard(model, optimizer, plan, mesh=mesh); or train it with terrazzo train, where plan.mesh says "
                "the same; or leave tz.parallelize out."
            )

    def shard(self, model: M, optimizer: Optimizer | Callable[[Any], Optimizer] | None = None) -> tuple[M, Any]:
        """Convert linear layers, checkpoint activations, compile units and shard: see `tz.shard`. Both change in place.

        Where the model is of transformers, its `generate` runs on all ranks together.

        Raises:
            BadInput: what `check` refuses, with nothing changed; or what `tz.shard` refuses, behind the conversions.
        """
        self.check(model)
        if self.float8 is not None:
            _convert_linears(model, self.float8, self.skip)
        chosen, units = self.activation_checkpointing, self.arguments.units
        checkpoint_activations(
            model, chosen.mode, units=units, every=chosen.every, ops=chosen.ops, offload=chosen.offload
        )
        if self.compile:
            compile_units(model, units=units)
        sharded = shard(model, optimizer, **self.arguments.set_ones())
        generate_together(model)
        return sharded


def trained_dtypes(model: nn.Module) -> list[torch.dtype]:
    """The dtypes of floating parameters that are trained, of all where none is, in their order; else fp32.

    A frozen base beside adapters does not count.
    """
    trained = [each for each in model.parameters() if each.requires_grad] or list(model.parameters())
    return list(dict.fromkeys(each.dtype for each in trained if each.is_floating_point())) or [torch.float32]


def trained_dtype(model: nn.Module) -> torch.dtype:
    """The one dtype of what is trained. Raises: `BadInput` where there are several."""
    dtypes = trained_dtypes(model)
    if len(dtypes) > 1:
        raise BadInput(f"The trained parameters are {', '.join(sorted(map(str, dtypes)))}: give them one dtype.")
    return dtypes[0]


def _convert_linears(model: nn.Module, recipe: str, skip: Sequence[str] | None) -> None:
    """Have linear layers multiply in 8 bits, as `tz.nn.float8` does, and say on the first rank which do."""
    conversion = float8(model, recipe, skip=skip)
    if is_first():
        logging.getLogger("terrazzo").warning("%s", conversion)
