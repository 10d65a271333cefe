"""Adapters before `tz.shard`: what is refused, and their initial values on the meta device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from torch import Tensor, nn

from terrazzo.errors import BadInput
from terrazzo.integrations.peft.names import base_model, peft_model
from terrazzo.messages import listed

__all__ = ["prepare_adapters", "require_unmerged"]


def prepare_adapters(model: nn.Module) -> None:
    """Check that `tz.shard` can take `model`, and on the meta device see to it that adapters begin as PEFT's do.

    To be called between `get_peft_model` and `tz.shard`: needed for a model on the meta device, whose adapters would
    otherwise be drawn like the weights of the base.

    Raises:
        BadInput: not a PEFT model, a quantized base, prompts that are learnt, adapters that are merged, or an
            initialisation that needs weights.
    """
    base = base_model(model)
    if getattr(base, "is_quantized", False) or any(not p.is_floating_point() for p in base.parameters()):
        raise BadInput(
            "The base of this PEFT model is quantized already, which cannot be sharded. Load it without a "
            "quantization_config, and give tz.shard a precision whose frozen is 'nf4': it keeps the base in 4 bits, "
            "divided by the ranks."
        )
    for config in peft_model(model).peft_config.values():
        if config.is_prompt_learning:
            raise BadInput(f"Adapters of type {config.peft_type.value} add prompts; use one that adds to layers: LoRA.")
    require_unmerged(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        _initialise_as_peft(model)


def require_unmerged(model: nn.Module) -> None:
    """Raise `BadInput` if an adapter is added to the base already: PEFT then trains none, and the base is another."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and (merged := module.merged_adapters):
            raise BadInput(
                f"{name} has {listed([*map(repr, merged)])} added to its matrix already, which is then the base's no "
                "more. Call model.unmerge_adapter() before tz.shard."
            )


def _initialise_as_peft(model: nn.Module) -> None:
    """Have the adapters on the meta device begin as PEFT's do, and not as the layers of the base model."""
    from peft.tuners.lora import LoraLayer

    configs = peft_model(model).peft_config
    for name, config in configs.items():
        if config.peft_type.value != "LORA" or config.init_lora_weights not in (True, "gaussian") or config.use_dora:
            raise BadInput(
                "On the meta device only plain LoRA adapters with init_lora_weights True or 'gaussian' can be "
                f"initialised, and adapter {name!r} is another. Build the model on a real device."
            )
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            if layer.lora_embedding_A:
                raise BadInput(
                    "LoRA on an embedding cannot be initialised on the meta device: leave it out of targets."
                )
            for name, down in layer.lora_A.items():
                is_normal = configs[name].init_lora_weights == "gaussian"
                draw = functools.partial(nn.init.normal_, std=1 / layer.r[name]) if is_normal else _draw_uniform
                down._init_weights = functools.partial(_set_own, draw)
                layer.lora_B[name]._init_weights = functools.partial(_set_own, nn.init.zeros_)


def _draw_uniform(weight: Tensor) -> None:
    """As PEFT does where `init_lora_weights` is True."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def _set_own(fill: Callable[[Tensor], object], module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        fill(parameter)
