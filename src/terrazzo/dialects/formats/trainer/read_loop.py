"""Batch, optimizer, schedule, clipping, saving: what TrainingArguments say of the training loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingOrigin, SettingsByKey
from terrazzo.dialects.core.keys import MISSING
from terrazzo.dialects.core.keys import number as number_type
from terrazzo.dialects.core.reader import derived, given_only
from terrazzo.dialects.formats.trainer.keys import FIELDS
from terrazzo.dialects.formats.trainer.reader import TrainerReader

__all__ = ["read_loop"]

_POLYNOMIAL_END = 1e-7


def read_loop(source: TrainerReader) -> SettingsByKey:
    """All of it."""
    return {**_batch(source), **_optimizer(source), **_schedule(source), **_training(source), **_saving(source)}


def _batch(source: TrainerReader) -> SettingsByKey:
    return {
        "batch.micro_batch": source.take("per_device_train_batch_size"),
        "batch.accumulation": source.take("gradient_accumulation_steps"),
    }


def _optimizer(source: TrainerReader) -> SettingsByKey:
    name = source.take("optim")
    found = {
        "optimizer.name": name,
        "optimizer.lr": source.take("learning_rate"),
        "optimizer.weight_decay": source.take("weight_decay"),
    }
    if name.value in ("SGD", "Adagrad", "RMSprop"):
        for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            if key in source.flat:
                source.refuse(key, f"it is Adam's; {name.value} does not read it: remove it")
        return found
    first, second = (source.take(f"adam_beta{each}") for each in (1, 2))
    origin: SettingOrigin = "file" if "file" in (first.origin, second.origin) else "default"
    return {
        **found,
        "optimizer.betas": derived((first.value, second.value), first, second, origin=origin),
        "optimizer.eps": source.take("adam_epsilon"),
    }


# -- schedule ------------------------------------------------------------------------------------------------------


def _schedule(source: TrainerReader) -> SettingsByKey:
    word = str(source.get("lr_scheduler_type") or "linear").lower()
    name = source.take("lr_scheduler_type")
    options = source.get("lr_scheduler_kwargs")
    options = dict(options) if isinstance(options, Mapping) else {}
    found: SettingsByKey = {"schedule.name": name, **_length(source), **_warmup(source, word)}
    found |= _shape(source, word, options)
    if "lr_scheduler_kwargs" in source.flat:
        read = any("lr_scheduler_kwargs" in setting.keys for setting in found.values())
        why = "further arguments of Hugging Face's schedule"
        source.keep("lr_scheduler_kwargs", why, loss="harmless" if read or not options else "lossy")
    return found


def _shape(source: TrainerReader, word: str, options: Mapping[str, Any]) -> SettingsByKey:
    """Where the learning rate ends, and how it gets there."""

    def number(name: str, default: float) -> Setting[Any]:
        value = number_type(-math.inf).parse(options.get(name))
        given = value is not MISSING
        return Setting(value, "file", "lr_scheduler_kwargs") if given else Setting(default, "default")

    peak = source.take("learning_rate").value or FIELDS["learning_rate"].default
    final = "schedule.final_fraction"
    if word == "cosine_with_min_lr":
        lowest = number("min_lr", 0.0)
        share = (
            Setting(lowest.value / peak, lowest.origin, lowest.key) if "min_lr" in options else number("min_lr_rate", 0)
        )
        return {final: share}
    if word == "polynomial" and number("power", 1.0).value == 1.0:
        end = number("lr_end", _POLYNOMIAL_END)
        line = Setting("linear", "file", "lr_scheduler_type")
        return {"schedule.name": line, final: Setting(end.value / peak, end.origin, end.key)}
    if word == "warmup_stable_decay":
        decay = number("num_decay_steps", 0)
        found: SettingsByKey = {final: number("min_lr_ratio", 0.0)}
        kind = options.get("decay_type", "cosine")
        if kind != "linear":
            found["schedule.options"] = Setting({"decay_type": kind}, "file", "lr_scheduler_type")
        return {**found, "schedule.decay_steps": Setting(int(decay.value), "file", decay.key)} if decay.value else found
    return {final: Setting(0.0, "default")} if word in ("linear", "cosine") else {}


def _warmup(source: TrainerReader, word: str) -> SettingsByKey:
    warmup = source.take("warmup_steps")
    if word == "constant":
        if warmup.value:
            why = "the schedule constant has no warm-up and ignores it: say lr_scheduler_type: constant_with_warmup"
            source.refuse("warmup_steps", why)
        return {"schedule.warmup_steps": Setting(0, "default")}
    if 0 < warmup.value < 1:
        return {"schedule.warmup_fraction": warmup}
    return {"schedule.warmup_steps": Setting(int(warmup.value), warmup.origin, warmup.key)}


def _length(source: TrainerReader) -> SettingsByKey:
    """The length of the run. By passes over the data, nobody knows it in steps."""
    steps = number_type(-math.inf).parse(source.get("max_steps", -1))
    by_epochs = steps is MISSING or steps <= 0
    if steps in (-1, 0):
        source.keep("max_steps", "the run is as long as num_train_epochs says", loss="harmless")
        total = Setting(None, "default")
    else:
        total = source.take("max_steps")
    if "num_train_epochs" in source.flat:
        source.take("num_train_epochs")
        if by_epochs:
            why = "the length of the run is counted in passes over the data: set the number of steps"
            source.keep("num_train_epochs", why)
        else:
            source.keep("num_train_epochs", "max_steps decides", loss="harmless")
    return given_only({"schedule.total_steps": total})


# -- clipping, compile, saving -------------------------------------------------------------------------------------


def _training(source: TrainerReader) -> SettingsByKey:
    clip = source.take("max_grad_norm")
    by = [key for key in ("torch_compile_backend", "torch_compile_mode") if source.get(key)]
    compiled = source.take("torch_compile")
    if by and not compiled.value:
        compiled = Setting(True, "file", ", ".join(by))
    found = {
        "training.clip": Setting(clip.value or None, clip.origin, clip.key),
        "training.compile": compiled,
        "training.seed": source.take("seed"),
        **_checkpointing(source),
    }
    cpu = source.take("use_cpu")
    return {**found, "training.device": Setting("cpu", "file", cpu.key)} if cpu.value else found


def _checkpointing(source: TrainerReader) -> SettingsByKey:
    found = [source.take("activation_checkpointing")]
    if source.get("fsdp"):
        found.append(source.take("fsdp_config.activation_checkpointing"))
    on = any(setting.value for setting in found)
    said = [setting for setting in found if setting.origin == "file"]
    origin: SettingOrigin = "file" if said else "default"
    return {"activation_checkpointing.mode": derived("full" if on else "none", *said, origin=origin)}


def _saving(source: TrainerReader) -> SettingsByKey:
    strategy = source.take("save_strategy")
    steps = source.take("save_steps")
    limit = source.take("save_total_limit")
    found = {
        "saving.keep_last": limit,
        **given_only({"saving.folder": source.take("output_dir")}),
        "saving.background": Setting(False, "default"),
    }
    if strategy.value == "steps" and steps.value >= 1:
        return {**found, "saving.every": derived(int(steps.value), steps, strategy, origin=steps.origin)}
    if strategy.origin == "file":
        whys = {"epoch": "a checkpoint after every pass over the data", "best": "a checkpoint when it is better"}
        source.keep(
            "save_strategy", whys.get(strategy.value, ""), loss="lossy" if strategy.value in whys else "harmless"
        )
    if steps.origin == "file":
        by_share = strategy.value == "steps"
        why = "a share of the run whose steps are not known" if by_share else "save_strategy decides"
        source.keep("save_steps", why, loss="lossy" if by_share else "harmless")
    if strategy.value == "no":
        return {**found, "saving.every": Setting(None, "file", "save_strategy")}
    return found
