"""Lightning's checkpoints as Terrazzo's: a folder of safetensors, with the Trainer's own state as JSON beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from terrazzo import checkpoint as checkpoints
from terrazzo.checkpoint.read import own_folder
from terrazzo.errors import BadInput
from terrazzo.exchange import on_first, together
from terrazzo.integrations.lightning.state import from_json, to_json
from terrazzo.integrations.saving import save_over, settle

__all__ = ["check_replaceable", "check_there", "load_checkpoint", "save_checkpoint"]

_TENSORS = ("state_dict", "optimizer_states")
_KEY = "lightning"


def save_checkpoint(path: str, model: nn.Module, optimizer: Optimizer | None, checkpoint: dict[str, Any]) -> None:
    """Write `checkpoint`, with the model's and the optimizer's own state in place of what it says of them. Collective.

    One that has the same name is replaced, once the new one is complete.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in _TENSORS}
    extra = {"step": int(checkpoint.get("global_step", 0)), _KEY: to_json(rest)}
    together(lambda: check_replaceable(path), BadInput)
    save_over(path, model, optimizer, extra)


def check_replaceable(path: str) -> None:
    """Raises: `BadInput` where a folder has the name that a save would take away."""
    if os.path.isdir(path) and own_folder(path) is None:
        raise BadInput(f"'{path}' is a folder that is not a checkpoint of Terrazzo's: it is not replaced.")


def load_checkpoint(path: str, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Restore the model and the optimizer; returns what else Lightning has put into the checkpoint. Collective.

    Args:
        path: of a checkpoint that `save_checkpoint` wrote; or, without an optimizer, of a file of Lightning's.
    """
    settle(path)
    together(lambda: check_there(path), BadInput)
    if not on_first(lambda: own_folder(path) is not None, BadInput):
        return _load_file(path, model, optimizer)
    source = together(lambda: checkpoints.open_source(path), BadInput)
    if _KEY not in source.extra:
        raise BadInput(f"'{path}' is a checkpoint without a Trainer's state: load it with tz.checkpoint.load_weights.")
    found: dict[str, Any] = from_json(source.extra[_KEY])
    checkpoints.load(path, model, optimizer if source.optimizer is not None else None)
    return {"state_dict": {}, **found}


def check_there(path: str) -> None:
    """Raises: `BadInput` where nothing has the name."""
    if not os.path.lexists(path):
        raise BadInput(f"There is no checkpoint '{path}', and every rank must see it.")


def _load_file(path: str, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Weights of a checkpoint that another strategy has written as one file."""
    if optimizer is not None:
        raise BadInput(
            f"'{path}' was not written by the terrazzo strategy, so fit() cannot go on from it. For its weights alone, "
            f"call tz.checkpoint.load_weights, or LightningModule.load_from_checkpoint before fit()."
        )
    found: dict[str, Any] = torch.load(Path(path), map_location="cpu", weights_only=True)
    model.load_state_dict(found["state_dict"])
    return {**found, "state_dict": {}}
