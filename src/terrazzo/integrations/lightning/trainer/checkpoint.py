"""Lightning's checkpoints as Terrazzo's: a folder of safetensors, with the Trainer's own state as JSON beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from terrazzo.errors import BadInput
from terrazzo.integrations.lightning.checkpoint_folder import is_folder, read_file
from terrazzo.integrations.lightning.plain_state import from_json, to_json
from terrazzo.integrations.shared.checkpoints import opened, resume, save_over
from terrazzo.messages import listed

__all__ = ["load_checkpoint", "save_checkpoint"]

_TENSORS = ("state_dict", "optimizer_states")
_KEY = "lightning"


def save_checkpoint(path: str, model: nn.Module, optimizer: Optimizer | None, checkpoint: dict[str, Any]) -> None:
    """Write `checkpoint`, with the model's and the optimizer's own state in place of what it says of them. Collective.

    One that has the same name is replaced, once the new one is complete. What is beside them is the first rank's.

    Raises:
        BadInput: a hook has put weights or states of its own among those, such as an average; on all ranks.
    """
    save_over(path, model, optimizer, lambda: _beside_tensors(checkpoint), files=True)


def _beside_tensors(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint has beside weights and states, as JSON."""
    added = [*checkpoint.get("state_dict", ()), *(f"{key} of an optimizer" for key in _added_states(checkpoint))]
    if added:
        raise BadInput(
            f"on_save_checkpoint, of the module or of a callback, has put {listed(added, 5)} among the weights and "
            "states, which are written from where they are sharded: give it a key of its own in the checkpoint. A "
            "callback that averages weights (WeightAveraging) is left out, or trains without checkpoints."
        )
    rest = {key: value for key, value in checkpoint.items() if key not in _TENSORS}
    return {"step": int(checkpoint.get("global_step", 0)), _KEY: to_json(rest)}


def load_checkpoint(path: str, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Restore the model and the optimizer; returns what else the checkpoint has: of a file the weights. Collective.

    Args:
        path: of a checkpoint that `save_checkpoint` wrote; or of a file of Lightning's, with weights that are whole.
    """
    if not is_folder(path):
        return _load_file(path, optimizer)
    source = opened(path)
    if _KEY not in source.extra:
        raise BadInput(f"'{path}' is a checkpoint without a Trainer's state: load it with tz.checkpoint.load_weights.")
    saved: dict[str, Any] = from_json(source.extra[_KEY])
    resume(source, model, optimizer if source.optimizer is not None else None)
    return {"state_dict": {}, **saved}


def _added_states(checkpoint: Mapping[str, Any]) -> list[str]:
    return [key for states in checkpoint.get("optimizer_states", ()) for key in states]


def _load_file(path: str, optimizer: Optimizer | None) -> dict[str, Any]:
    """A checkpoint that another strategy has written as one file: the weights in it, and the state of one optimizer."""
    saved = read_file(path)
    if optimizer is not None and "optimizer_states" in saved:  # else Lightning says what is missing
        if len(saved["optimizer_states"]) != 1:
            raise BadInput(
                f"'{path}' has the states of {len(saved['optimizer_states'])} optimizers, and the terrazzo strategy "
                "drives one. For its weights alone, call LightningModule.load_from_checkpoint before fit()."
            )
        optimizer.load_state_dict(saved["optimizer_states"][0])
    return saved
