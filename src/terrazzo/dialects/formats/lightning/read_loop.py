"""What Lightning's Trainer says of the training loop."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.keys import number
from terrazzo.dialects.core.reader import Reader, derived, only_from_file
from terrazzo.dialects.formats.lightning.model_checkpoint import read_callbacks
from terrazzo.dialects.formats.lightning.trainer_arguments import TrainerArguments
from terrazzo.dialects.formats.shared.class_defaults import class_defaults
from terrazzo.messages import did_you_mean

__all__ = ["read_loop"]


def read_loop(reader: Reader, trainer: TrainerArguments) -> SettingsByPath:
    """Accumulation, clipping, length, seed, ranks, optimizer."""
    prefix = trainer.prefix
    steps = f"{prefix}max_steps"
    total = reader.take(steps)
    if total.value is None and total.origin == "file":
        reader.keep(steps, "the run is as long as max_epochs says", loss="harmless")
    if reader.raw(epochs := f"{prefix}max_epochs") == -1:
        reader.keep(epochs, "max_steps decides" if total.value else "the run has no end", loss="harmless")
    seed = reader.raw("seed_everything")
    if isinstance(seed, bool):
        reader.keep("seed_everything", "Lightning draws a seed", loss="harmless")
    return {
        "batch.accumulation": reader.take(f"{prefix}accumulate_grad_batches"),
        "training.clip": _clip(reader, prefix),
        **(only_from_file({"schedule.total_steps": total}) if total.value else {}),
        **(only_from_file({"training.seed": reader.take("seed_everything")}) if not isinstance(seed, bool) else {}),
        **only_from_file({"saving.folder": reader.take(f"{prefix}default_root_dir")}),
        **read_callbacks(reader, trainer),
        **_ranks(reader, prefix),
        **_optimizer(reader),
    }


def _clip(reader: Reader, prefix: str) -> Setting[Any]:
    value = reader.take(f"{prefix}gradient_clip_val")
    way = reader.take(f"{prefix}gradient_clip_algorithm")
    if way.value == "value" and value.value:
        for key in (value.key, way.key):
            reader.keep(key, "each gradient is clipped by itself: clip by norm, or in your own loop", loss="refused")
        return Setting(None, "default")
    clipped = value.value or None
    return Setting(clipped, value.origin, value.key)


def _ranks(reader: Reader, prefix: str) -> SettingsByPath:
    devices, nodes = reader.take(f"{prefix}devices"), reader.take(f"{prefix}num_nodes")
    settings = only_from_file({"mesh.nodes": nodes})
    if devices.value is not None:
        settings["mesh.world"] = derived(devices.value * nodes.value, devices, nodes, origin="file")
    accelerator = reader.take(f"{prefix}accelerator")
    if accelerator.value in ("tpu", "mps"):
        reader.keep(accelerator.key, "only Lightning trains on such devices")
    elif accelerator.value is not None:
        settings["training.device"] = accelerator
    return settings


def _optimizer(reader: Reader) -> SettingsByPath:
    """LightningCLI's `optimizer`. The class is named, never imported."""
    key = "optimizer.class_path"
    path = reader.take(key)
    if path.value is None:
        return {}
    name = path.value.rpartition(".")[2]
    known = path.value.startswith("torch.optim") or path.value == name
    named = name if known and hasattr(torch.optim, name) else path.value
    section = "optimizer.init_args"
    settings: SettingsByPath = {"optimizer.name": Setting(named, "file", key)}
    defaults = class_defaults(name) if known else {}
    if "lr_scheduler" not in reader:  # LightningCLI replaces the module's configure_optimizers by these two
        settings["schedule.name"] = Setting("constant", "default")
        settings["schedule.warmup_steps"] = Setting(0, "default")
    for argument in ("lr", "eps", "weight_decay"):
        settings |= only_from_file({f"optimizer.{argument}": reader.take_as(f"{section}.{argument}", number())})
    decay = settings.get("optimizer.weight_decay", settings["optimizer.name"])
    settings["optimizer.decay"] = derived("all", decay)
    betas = reader.raw(f"{section}.betas")
    pair = isinstance(betas, Sequence) and not isinstance(betas, str) and len(betas) == 2
    if pair and all(isinstance(beta, int | float) for beta in betas):
        reader.mark(f"{section}.betas", "applied")
        settings["optimizer.betas"] = Setting(tuple(betas), "file", f"{section}.betas")
    others = [each for each in reader.unread() if each.startswith(f"{section}.")]
    if known and isinstance(getattr(torch.optim, name, None), type):
        others = [each for each in others if not _unknown_to(reader, name, each)]
    if others:
        options = {each.removeprefix(f"{section}."): reader.raw(each) for each in others}
        for each in others:
            reader.mark(each, "applied")
        settings["optimizer.options"] = derived(
            options, *(Setting(None, "file", each) for each in others), origin="file"
        )
    return defaults | settings


def _unknown_to(reader: Reader, name: str, key: str) -> bool:
    """Whether a class of torch.optim takes no argument of that name, which is then refused."""
    arguments, argument = inspect.signature(getattr(torch.optim, name)).parameters, key.rpartition(".")[2]
    if argument not in arguments:
        reader.refuse(
            key, f"torch.optim.{name} has no such argument and raises a TypeError.{did_you_mean(argument, arguments)}"
        )
    return argument not in arguments
