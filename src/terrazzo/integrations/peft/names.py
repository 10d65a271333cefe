"""What PEFT calls parameters: in a model that has adapters, and in a folder of one."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from terrazzo.engine import parameters_by_names
from terrazzo.errors import BadInput

__all__ = ["BASE_LAYER", "base_model", "base_name", "peft_model", "saved_names"]

BASE = "base_model.model."
BASE_LAYER = ".base_layer."


def base_name(name: str) -> str:
    """The name of a base parameter before there were adapters."""
    return re.sub(r"(\.base_layer)+\.", ".", name.removeprefix(BASE))


def peft_model(model: nn.Module) -> Any:
    """`model` as PEFT's class. Raises: `BadInput` where it is of another."""
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise BadInput(
            f"This {type(model).__name__} has no adapters. Call get_peft_model(model, config) before tz.shard."
        )
    return model


def base_model(model: nn.Module) -> Any:
    """The model that the adapters are on. Raises: `BadInput` where there are none."""
    return peft_model(model).get_base_model()


def saved_names(model: nn.Module, adapter: str) -> dict[str, str]:
    """Names in a PEFT folder → names of parameters. PEFT says which, shown an empty tensor for each parameter."""
    from peft import get_peft_model_state_dict

    configs = peft_model(model).peft_config
    if adapter not in configs:
        raise BadInput(f"The model has no adapter {adapter!r}; it has {sorted(configs)}.")
    shown = {name: torch.empty(0) for names in parameters_by_names(model) for name in names}
    names = {id(tensor): name for name, tensor in shown.items()}
    with _unread(model):
        saved = get_peft_model_state_dict(model, state_dict=shown, adapter_name=adapter, save_embedding_layers=False)
    if unknown := [name for name, tensor in saved.items() if id(tensor) not in names]:
        raise BadInput(
            f"An adapter of type {configs[adapter].peft_type.value} computes what it saves ({unknown[0]!r}), so it "
            "cannot be saved or loaded under sharding. Use LoRA."
        )
    return {name: names[id(tensor)] for name, tensor in saved.items()}


@contextlib.contextmanager
def _unread(model: nn.Module) -> Iterator[None]:
    """Inside, the modules of `modules_to_save` list their tensors without reading them: PEFT wants the names."""
    from peft.utils.other import ModulesToSaveWrapper

    copies = [
        copy for m in model.modules() if isinstance(m, ModulesToSaveWrapper) for copy in m.modules_to_save.values()
    ]
    for module in copies:
        module.state_dict = functools.partial(module.state_dict, keep_vars=True)
    try:
        yield
    finally:
        for module in copies:
            del module.state_dict
