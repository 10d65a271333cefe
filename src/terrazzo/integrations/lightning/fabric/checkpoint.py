"""What `fabric.save` and `fabric.load` are given: a sharded model, its optimizer, and a script's own values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.optim import Optimizer

from terrazzo import checkpoint as checkpoints
from terrazzo.engine import ShardedModule, ShardedOptimizer
from terrazzo.errors import BadInput
from terrazzo.exchange import together
from terrazzo.integrations.lightning.checkpoint_folder import is_folder, read_file
from terrazzo.integrations.lightning.plain_state import from_json, to_json
from terrazzo.integrations.shared.checkpoints import opened, resume, save_over

__all__ = ["load_state", "load_weights", "save_state"]

_KEY = "fabric"
_STEPS = ("step", "global_step", "iteration")
"""Names of the value that the manifest notes, if the state has one."""


def save_state(path: str, state: Mapping[str, Any]) -> None:
    """Write a checkpoint, in place of one of the same name, once it is complete. Collective.

    Args:
        state: one sharded model, its optimizer if that is to be saved, and values or stateful objects as plain data.
    """
    model, optimizer, rest = together(lambda: _sorted(state, "save"), BadInput)
    # On all ranks: a `state_dict` may talk to the others.
    plain = {name: value.state_dict() if isinstance(value, _Stateful) else value for name, value in rest.items()}
    step = next((value for name in _STEPS if type(value := rest.get(name)) is int and value >= 0), 0)
    save_over(path, model, optimizer, lambda: {"step": step, _KEY: to_json(plain, "state")}, files=True)


def load_state(path: str, state: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Restore the model and the optimizer in `state`, and put its other values in place. Collective.

    Args:
        path: of any checkpoint of Terrazzo's, or of a file that Fabric wrote with a strategy that keeps weights whole.
        strict: refuse values that the checkpoint does not have, and in a file names of weights that do not match.

    Returns:
        Values of the checkpoint that `state` does not have.
    """
    model, optimizer, rest = together(lambda: _sorted(state, "load"), BadInput)
    source = opened(path) if is_folder(path) else None
    if source is not None:
        saved: dict[str, Any] = from_json(source.extra.get(_KEY, {}))
    else:
        saved = read_file(path)
    name_of_model = next(name for name, value in state.items() if value is model)
    missing = sorted((state if source is None else rest).keys() - saved.keys())
    if missing and (strict or name_of_model in missing):
        raise BadInput(f"fabric.load: '{path}' has no {', '.join(missing)}. Leave it out of the state.")
    if source is not None:
        resume(source, model, optimizer)
    else:
        model.load_state_dict(saved.pop(name_of_model), strict)
        named = next((name for name, value in state.items() if value is optimizer), None)
        if optimizer is not None and named in saved:
            optimizer.load_state_dict(saved.pop(named))
    for name in rest.keys() & saved.keys():
        value = saved.pop(name)
        if isinstance(rest[name], _Stateful):
            rest[name].load_state_dict(value)
        else:
            state[name] = value
    return saved


def load_weights(path: str, model: nn.Module, strict: bool) -> None:
    """Weights alone: of any checkpoint of Terrazzo's, or of a file with a state dict. Collective."""
    if is_folder(path):
        checkpoints.load_weights(model, path)
    else:
        model.load_state_dict(read_file(path), strict)


def _sorted(state: Mapping[str, Any], call: str) -> tuple[nn.Module, Optimizer | None, dict[str, Any]]:
    """The model, its optimizer, and everything else."""
    models = [value for value in state.values() if isinstance(value, ShardedModule)]
    optimizers = [value for value in state.values() if isinstance(value, ShardedOptimizer)]
    if len(models) != 1 or len(optimizers) > 1:
        raise BadInput(
            f"fabric.{call}: the state has {len(models)} models and {len(optimizers)} optimizers that fabric.setup has "
            "returned, and a checkpoint is of one model and its optimizer: give each model a folder of its own."
        )
    rest = {name: value for name, value in state.items() if value is not models[0] and value not in optimizers}
    for name, value in rest.items():
        if isinstance(value, nn.Module | Optimizer):
            raise BadInput(
                f"fabric.{call}: state[{name!r}] is a {type(value).__name__} that fabric.setup was not given: leave it "
                "out, and save it by itself."
            )
    return models[0], optimizers[0] if optimizers else None, rest
