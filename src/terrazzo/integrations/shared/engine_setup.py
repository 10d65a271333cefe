"""What every integration asks of the engine, and does to a model before it shards it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from terrazzo.engine import (
    Offload,
    Plan,
    Precision,
    Units,
    checkpoint_activations,
    compile_units,
    shard,
)
from terrazzo.engine.sharding.mesh_checks import exchanged_along
from terrazzo.errors import BadInput
from terrazzo.integrations.shared.first_rank import is_first
from terrazzo.integrations.shared.generation import generate_together
from terrazzo.nn import float8

__all__ = ["ActivationSetup", "EngineSetup", "TerrazzoArguments", "trained_dtypes"]

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
    """What a configuration asks of the engine.

    Attributes:
        plan, precision, units, prefetch, offload: as for `tz.shard`.
        mesh: of all ranks; None where there is no process group.
        autocast: dtype of torch.autocast, which the integration enters around the model's forward; None for none.
        clip: largest global gradient norm; None for no clipping.
        accumulation: micro-batches per optimizer step.
        activation_checkpointing: of the units.
        compile: each unit's forward is compiled.
        float8: the recipe by which linear layers multiply in 8 bits, as for `tz.nn.float8`; None for none. skip: globs
            over names of those that do not; None: those outside of the blocks.
    """

    plan: Plan
    precision: Precision
    mesh: DeviceMesh | None = None
    units: tuple[str, ...] | None = None
    prefetch: int = 1
    offload: Offload = field(default_factory=Offload)
    autocast: torch.dtype | None = None
    clip: float | None = None
    accumulation: int = 1
    activation_checkpointing: ActivationSetup = ActivationSetup()
    compile: bool = False
    float8: str | None = None
    skip: tuple[str, ...] | None = None

    def over(self, **changes: Any) -> Self:
        """This one with what is given in its place, plan and precision perhaps by name; None leaves what is here."""
        set_ones = {name: value for name, value in changes.items() if value is not None}
        for name, kind in (("plan", Plan), ("precision", Precision)):
            if isinstance(set_ones.get(name), str | torch.dtype):
                set_ones[name] = kind.named(set_ones[name])
        return replace(self, **set_ones)

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
        chosen = self.activation_checkpointing
        checkpoint_activations(
            model, chosen.mode, units=self.units, every=chosen.every, ops=chosen.ops, offload=chosen.offload
        )
        if self.compile:
            compile_units(model, units=self.units)
        sharded = shard(
            model,
            optimizer,
            self.plan,
            units=self.units,
            precision=self.precision,
            mesh=self.mesh,
            prefetch=self.prefetch,
            offload=self.offload,
        )
        generate_together(model)
        return sharded


@dataclass(frozen=True)
class TerrazzoArguments:
    """What goes before the other library's own arguments, as for `tz.shard`; None leaves it to them.

    Attributes:
        plan: such as `zero3`. TrainingArguments say it by `fsdp` or `deepspeed`, and without those mean `zero0`, DDP.
        precision: such as `bf16`. TrainingArguments' `bf16` without FSDP is autocast on fp32 weights.
        units: class names of the modules that are gathered as one.
        mesh: of all ranks.
        prefetch: units gathered ahead.
        offload: how states on `cpu` or `nvme` are kept.
    """

    plan: Plan | str | None = None
    precision: Precision | str | torch.dtype | None = None
    units: Units | None = None
    mesh: DeviceMesh | None = None
    prefetch: int | None = None
    offload: Offload | None = None

    def over(self, setup: EngineSetup) -> EngineSetup:
        """The setup with what is given here."""
        return replace(setup.over(**vars(self)), autocast=None if self.precision is not None else setup.autocast)


def trained_dtypes(model: nn.Module) -> list[torch.dtype]:
    """The dtypes of floating parameters that are trained, of all where none is, in their order; else fp32.

    A frozen base beside adapters does not count.
    """
    trained = [each for each in model.parameters() if each.requires_grad] or list(model.parameters())
    return list(dict.fromkeys(each.dtype for each in trained if each.is_floating_point())) or [torch.float32]


def _convert_linears(model: nn.Module, recipe: str, skip: Sequence[str] | None) -> None:
    """Have linear layers multiply in 8 bits, as `tz.nn.float8` does, and say on the first rank which do."""
    conversion = float8(model, recipe, skip=skip)
    if is_first():
        logging.getLogger("terrazzo").warning("%s", conversion)
