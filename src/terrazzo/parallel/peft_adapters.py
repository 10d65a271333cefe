"""LoRA adapters of `peft` on modules that are cut: which of their matrices are cut too.

LoRA adds `B (A x)` to a linear layer's output. On a layer of style colwise, a rank has a part of B's outputs and all of
A. On a layer of style rowwise, it has a part of A's inputs, whose outputs ranks sum, and all of B.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from terrazzo.errors import BadInput
from terrazzo.parallel.tensor.styles import Colwise, Replicate, Rowwise, Style

__all__ = ["adapted", "base_of", "layer_of", "with_adapters"]


def adapted(model: nn.Module) -> list[str]:
    """Names of the modules that have adapters of `peft`."""
    return [name for name, module in model.named_modules() if _is_adapted(module)]


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "active_adapters")


def base_of(model: nn.Module) -> tuple[nn.Module, str]:
    """A model without adapters around it, and the prefix of its names; the model itself where there are none."""
    peft = sys.modules.get("peft")  # not imported for this
    if peft is None or not isinstance(model, peft.PeftModel):
        return model, ""
    base: nn.Module = model.get_base_model()
    return base, next(f"{name}." for name, module in model.named_modules() if module is base)


def with_adapters(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """The styles of modules by name, where the style of a layer with an adapter is given to its matrices.

    Raises:
        BadInput: an adapter that is no product of two matrices, on a module that is cut.
    """
    moved: dict[str, Style] = {}
    for name, style in styles.items():
        layer: Any = model.get_submodule(name)
        if not _is_adapted(layer):
            moved[name] = style
            continue
        if not _is_plain(layer) or not isinstance(style, Colwise | Rowwise):
            raise BadInput(
                f"{name!r} is a {type(layer).__name__} of peft, which the style {type(style).__name__.lower()} does "
                "not know: ranks can share linear layers with plain LoRA adapters. Leave it out of the adapter's "
                f"target_modules, or give {name!r} no style in the tensor-parallel plan."
            )
        moved[f"{name}.base_layer"] = style
        for adapter in layer.lora_A:
            cut, whole = ("lora_B", "lora_A") if isinstance(style, Colwise) else ("lora_A", "lora_B")
            moved[f"{name}.{cut}.{adapter}"] = replace(style)
            moved[f"{name}.{whole}.{adapter}"] = Replicate(after_sum=isinstance(style, Rowwise))
    return moved


def layer_of(name: str) -> str:
    """The name of the layer that a matrix of `with_adapters` is in; of a layer without adapters its own."""
    return re.split(r"\.base_layer$|\.lora_[AB]\.", name)[0]


def _is_plain(layer: Any) -> bool:
    """Whether it adds a product of two matrices to a matrix of its own, and nothing else."""
    names = ("lora_A", "lora_B")
    linear = all(isinstance(each, nn.Linear) for name in names for each in getattr(layer, name, {"": None}).values())
    return linear and not getattr(layer, "lora_variant", None)
