"""How `transformers` names and cuts a model's tensors in a folder, where these are not as in the model.

It keeps a layer's experts as stacks of matrices, and its folders have the matrices of each expert apart, under the
names of the model's first code. What it does as it saves a model is done here to tensors without memory: each that
comes out is a run of one that went in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from terrazzo.errors import BadInput

__all__ = ["HubTensor", "hub_tensors", "pretrained_model"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class HubTensor:
    """A tensor of a folder: elements of one of the model's, flat and row-major, from `start` on."""

    name: str
    shape: Shape
    start: int = 0


def pretrained_model(model: nn.Module) -> nn.Module | None:
    """The model of `transformers` that `model` is, or that it holds."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def hub_tensors(model: nn.Module, shapes: Mapping[str, Shape]) -> dict[str, list[HubTensor]]:
    """What a folder has of each tensor of the model, in the order of its elements.

    Args:
        model: of `transformers`.
        shapes: of its tensors, whole, by their names in it.

    Raises:
        BadInput: the folder has its tensors cut or joined in such a way that one there is not a run of one here.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 a folder had the model's own names
        return {name: [HubTensor(name, shape)] for name, shape in shapes.items()}
    shown = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    own = {id(tensor): name for name, tensor in shown.items()}
    parts_of: dict[str, list[HubTensor]] = {name: [] for name in shapes}
    try:
        with _Views():
            reverted: Mapping[str, Tensor] = revert_weight_conversion(model, dict(shown))
        for name, part in reverted.items():
            whole = part if part._base is None else part._base
            origin, shape = own[id(whole)], tuple(part.shape)
            if not part.is_contiguous():
                raise ValueError(f"{name} is no run of {origin}")
            parts_of[origin].append(HubTensor(name, shape, int(part.storage_offset())))
    except Exception as error:
        raise BadInput(
            f"The folder of a {type(model).__name__} has its weights cut or joined in another way than the model "
            f"({type(error).__name__}: {error}). Take state = tz.full_state_dict(model) on every rank, and "
            "model.save_pretrained(folder, state_dict=state) on rank 0."
        ) from None
    return {name: sorted(parts, key=lambda part: part.start) for name, parts in parts_of.items()}


class _Views(TorchFunctionMode):
    """Inside, parts of tensors stay views of these, so that it can be seen where they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))
