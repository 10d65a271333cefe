"""Accelerate's checkpoint folder with Terrazzo checkpoints inside, in place of its model and optimizer files."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
from torch import nn

from terrazzo.checkpoint import latest, load_newest, prune, save, step_path
from terrazzo.checkpoint.storage.store import step_of
from terrazzo.engine import ShardedModule, engine_of
from terrazzo.errors import BadInput
from terrazzo.exchange import on_first
from terrazzo.integrations.shared.checkpoints import opened, resume
from terrazzo.integrations.shared.first_rank import warn_once

__all__ = ["loading", "saving"]


@contextlib.contextmanager
def saving(accelerator: accelerate.Accelerator) -> Iterator[None]:
    """Inside, `save_state` of Accelerate's own class saves sharded models as Terrazzo checkpoints."""

    def hook(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        if users:  # they take out of both lists what is not to be saved, or write it in a form of their own
            full = [accelerator.get_state_dict(model, unwrap=False) for model in sharded]
            for each in users:
                each(sharded + models, full + weights, folder)
        for index, model in enumerate(sharded):
            place = _place(folder, index)
            number = _number(place) + 1
            save(step_path(place, number), model, engine_of(model).optimizer, {"step": accelerator.step})
            on_first(lambda place=place: prune(place, keep_last=1))  # type: ignore[misc]

    with _apart(accelerator, "_save_model_state_pre_hook", hook) as (sharded, users):
        yield


@contextlib.contextmanager
def loading(accelerator: accelerate.Accelerator) -> Iterator[None]:
    """Inside, `load_state` of Accelerate's own class restores sharded models, too."""
    steps: list[int] = []

    def hook(models: list[nn.Module], folder: str) -> None:
        for each in users:
            each(sharded + models, folder)
        for index, model in enumerate(sharded):
            resumed = load_newest(_place(folder, index), model, engine_of(model).optimizer)
            if resumed is not None:
                steps.append(resumed.extra["step"])
                for path, why in resumed.refused.items():
                    warn_once(f"resume: {path} is DAMAGED, not used: {why}")
            elif len(sharded) > 1:
                raise BadInput(f"'{folder}' has no Terrazzo checkpoint, and this run has {len(sharded)} models.")
            else:
                resume(opened(folder, model), model, engine_of(model).optimizer, files=False)  # Accelerate's own

    with _apart(accelerator, "_load_model_state_pre_hook", hook) as (sharded, users):
        yield
    if steps:
        accelerator.step = steps[0]  # ranks that Accelerate has no file for know it, too


@contextlib.contextmanager
def _apart(
    accelerator: accelerate.Accelerator, name: str, hook: Callable[..., None]
) -> Iterator[tuple[list[nn.Module], list[Callable[..., None]]]]:
    """Accelerate sees neither sharded models nor their optimizers, and `hook` in place of the user's hooks."""
    models, optimizers, hooks = accelerator._models, accelerator._optimizers, getattr(accelerator, name)
    sharded: list[nn.Module] = [model for model in models if isinstance(model, ShardedModule)]
    driven = [engine_of(model).optimizer for model in sharded]
    accelerator._models = [model for model in models if model not in sharded]
    accelerator._optimizers = [each for each in optimizers if each.optimizer not in driven]
    setattr(accelerator, name, OrderedDict(terrazzo=hook))
    try:
        yield sharded, list(hooks.values())
    finally:
        accelerator._models, accelerator._optimizers = models, optimizers
        setattr(accelerator, name, hooks)


def _place(folder: str, index: int) -> Path:
    return Path(folder) / ("terrazzo" if index == 0 else f"terrazzo_{index}")


def _number(place: Path) -> int:
    """The number of the newest checkpoint there, as rank 0 sees it."""
    return step_of(on_first(lambda: latest(place), BadInput) or "") or 0
