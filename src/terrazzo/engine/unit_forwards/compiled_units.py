"""Compilation of units, one by one: their graphs never see the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from terrazzo.engine.partition.asked_units import Units
from terrazzo.engine.unit_forwards.layered_forward import (
    Forward,
    Layer,
    LayeredForward,
    LayerRing,
    layers_of,
    surround,
    unit_modules,
)
from terrazzo.errors import BadInput

__all__ = ["compile_units"]


@dataclass(frozen=True, eq=False)
class _Compiled(Layer):
    """`torch.compile` with these options."""

    ring: ClassVar[LayerRing] = LayerRing.COMPILED
    options: Mapping[str, Any]

    def __call__(self, forward: Forward) -> Forward:
        return torch.compile(forward, **self.options)


def compile_units(model: nn.Module, *, units: Units | None = None, **options: Any) -> None:
    """Compile each unit's forward, of a model that is sharded or not; before or after `checkpoint_activations`.

    Before `tz.shard` ranks compare which units are compiled, since these reduce at other points of a step. After it
    nobody does: compile the same on every rank, and ask for memory bills again, which count it from then on.

    Args:
        units: as for `tz.shard`.
        options: for `torch.compile`.

    Raises:
        BadInput: no units, or one whose forward somebody has wrapped around offloading; nothing is compiled then.
    """

    modules = unit_modules(model, units, "compile_units")
    for module in modules:
        is_offloaded = any(layer.ring is LayerRing.OFFLOADED for layer in layers_of(module))
        if is_offloaded and not isinstance(module.forward, LayeredForward):
            raise BadInput(
                f"The forward of a {type(module).__name__}, whose activations are offloaded, has been wrapped since: "
                "compile units before that, right after checkpoint_activations."
            )
    for module in modules:
        surround(module, _Compiled(options))
