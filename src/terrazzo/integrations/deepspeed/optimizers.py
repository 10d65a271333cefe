"""The optimizer that the JSON asks for, over the parameters that the script gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.dialects.formats.deepspeed.keys import argument_default
from terrazzo.engine import ELEMENTWISE
from terrazzo.errors import BadInput

__all__ = ["Parameters", "build_optimizer"]

Parameters = nn.Module | Iterable[Tensor | dict[str, Any]]
"""A module, parameters, or param groups."""

_OWN_ADAM = ("torch_adam", "adam_w_mode", "set_grad_none")
"""Arguments of DeepSpeed's Adam that say which class it is, or where it runs."""
_ALWAYS = {"bias_correction": True, "fp32_optimizer_states": True}
"""Arguments that have one value here."""
_KNOWN: dict[str, type[Optimizer]] = {each.__name__: each for each in ELEMENTWISE}


def build_optimizer(name: str, params: Mapping[str, Any], parameters: Parameters) -> Optimizer:
    """The optimizer of that name over what is trainable.

    Args:
        name: as in torch.optim, which the dialect makes of DeepSpeed's types.
        params: the JSON's `optimizer.params`.
        parameters: parameters, param groups or a module.

    Raises: `BadInput` for one that cannot run on flat shards, and for arguments that it does not take.
    """
    if name not in _KNOWN:
        raise BadInput(
            f"optimizer.type is {name}. Terrazzo builds {', '.join(sorted(_KNOWN))}; pass another one, that updates "
            "each element from its own values alone, as initialize(optimizer=...)."
        )
    arguments: dict[str, Any] = dict(params)
    arguments |= {key: tuple(value) for key, value in params.items() if isinstance(value, list)}
    for key, value in _ALWAYS.items():
        if arguments.pop(key, value) != value:
            raise BadInput(f"optimizer.params.{key} is {params[key]}; here it is always {value}. Remove it.")
    if name in ("Adam", "AdamW"):
        usual = argument_default(name, "weight_decay", by_torch=bool(params.get("torch_adam")))
        arguments = {"weight_decay": usual, **arguments}
        arguments = {key: value for key, value in arguments.items() if key not in _OWN_ADAM}
    try:
        return _KNOWN[name](_trainable(parameters), **arguments)
    except (TypeError, ValueError) as error:
        raise BadInput(f"optimizer.params do not suit {name}: {error}.") from error


def _trainable(parameters: Parameters) -> list[Any]:
    """The parameters without frozen ones, and without param groups that are then empty."""
    trainable: list[Any] = []
    for each in parameters.parameters() if isinstance(parameters, nn.Module) else parameters:
        if isinstance(each, Mapping):
            inside = [parameter for parameter in each["params"] if parameter.requires_grad]
            trainable += [{**each, "params": inside}] if inside else []
        elif each.requires_grad:
            trainable.append(each)
    return trainable
