"""Batch, optimizer, schedule, clipping, saving: what TrainingArguments say of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.description import Origin, Setting
from terrazzo.dialects.reader import derived, given_only
from terrazzo.dialects.trainer.keys import FIELDS
from terrazzo.dialects.trainer.source import Source

__all__ = ["OPTIMIZERS", "OWN_SCHEDULES", "read_loop"]

OPTIMIZERS = {
    "adamw_torch_fused": "AdamW",
    "adamw_torch": "AdamW",
    "adamw_torch_xla": "AdamW",
    "adamw_torch_npu_fused": "AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
}
"""torch.optim's class by the Trainer's word."""
_OTHERS = (
    *("adafactor", "adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "adamw_bnb_8bit"),
    *("adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit"),
    *("paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb"),
    *("rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor"),
    *("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "lomo", "adalomo"),
    *("grokadamw", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw"),
    *("apollo_adamw_layerwise", "stable_adamw"),
)
OWN_SCHEDULES = ("cosine_with_restarts", "inverse_sqrt", "reduce_lr_on_plateau", "cosine_warmup_with_min_lr", "greedy")
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "polynomial": "polynomial",
    **{name: name for name in OWN_SCHEDULES},
}
_POLYNOMIAL_END = 1e-7
_Settings = dict[str, Setting[Any]]


def read_loop(source: Source) -> _Settings:
    """All of it."""
    return {**_batch(source), **_optimizer(source), **_schedule(source), **_training(source), **_saving(source)}


def _default(name: str) -> Any:
    return FIELDS[name][0]


def _batch(source: Source) -> _Settings:
    return {
        "batch.micro_batch": source.integer("per_device_train_batch_size", 8, low=1),
        "batch.accumulation": source.integer("gradient_accumulation_steps", 1, low=1),
    }


def _optimizer(source: Source) -> _Settings:
    words = {**OPTIMIZERS, **{name: name for name in _OTHERS}}
    name = source.choice("optim", words, "AdamW", fold=False)
    found = {
        "optimizer.name": name,
        "optimizer.lr": source.number("learning_rate", _default("learning_rate")),
        "optimizer.weight_decay": source.number("weight_decay", _default("weight_decay")),
    }
    if name.value in ("SGD", "Adagrad", "RMSprop"):
        for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            if key in source.flat:
                source.refuse(key, f"it is Adam's; {name.value} does not read it: remove it")
        return found
    first, second = (source.number(f"adam_beta{each}", _default(f"adam_beta{each}"), high=1) for each in (1, 2))
    origin: Origin = "file" if "file" in (first.origin, second.origin) else "default"
    return {
        **found,
        "optimizer.betas": derived((first.value, second.value), first, second, origin=origin),
        "optimizer.eps": source.number("adam_epsilon", _default("adam_epsilon")),
    }


# -- schedule ------------------------------------------------------------------------------------------------------


def _schedule(source: Source) -> _Settings:
    word = str(source.get("lr_scheduler_type") or "linear").lower()
    name = source.choice("lr_scheduler_type", _SCHEDULES, "linear")
    options = source.get("lr_scheduler_kwargs")
    options = dict(options) if isinstance(options, Mapping) else {}
    found: _Settings = {"schedule.name": name, **_length(source), **_warmup(source, word)}
    found |= _shape(source, word, options)
    if "lr_scheduler_kwargs" in source.flat:
        read = any("lr_scheduler_kwargs" in setting.keys for setting in found.values())
        source.keep("lr_scheduler_kwargs", "further arguments of Hugging Face's schedule", harmless=read or not options)
    return found


def _shape(source: Source, word: str, options: Mapping[str, Any]) -> _Settings:
    """Where the learning rate ends, and how it gets there."""

    def number(name: str, default: float) -> Setting[Any]:
        value = options.get(name)
        given = isinstance(value, int | float) and not isinstance(value, bool)
        return Setting(value, "file", "lr_scheduler_kwargs") if given else Setting(default, "default")

    peak = source.get("learning_rate", _default("learning_rate"))
    peak = peak if isinstance(peak, int | float) and peak > 0 else _default("learning_rate")
    final = "schedule.final_fraction"
    if word == "cosine_with_min_lr":
        lowest = number("min_lr", 0.0)
        share = (
            Setting(lowest.value / peak, lowest.origin, lowest.key) if "min_lr" in options else number("min_lr_rate", 0)
        )
        return {final: share}
    if word == "polynomial" and options.get("power", 1.0) == 1.0:
        end = number("lr_end", _POLYNOMIAL_END)
        line = Setting("linear", "file", "lr_scheduler_type")
        return {"schedule.name": line, final: Setting(end.value / peak, end.origin, end.key)}
    if word == "warmup_stable_decay":
        decay = number("num_decay_steps", 0)
        found: _Settings = {final: number("min_lr_ratio", 0.0)}
        kind = options.get("decay_type", "cosine")
        if kind != "linear":
            found["schedule.options"] = Setting({"decay_type": kind}, "file", "lr_scheduler_type")
        return {**found, "schedule.decay_steps": Setting(int(decay.value), "file", decay.key)} if decay.value else found
    return {final: Setting(0.0, "default")} if word in ("linear", "cosine") else {}


def _warmup(source: Source, word: str) -> _Settings:
    warmup = source.number("warmup_steps", 0)
    if word == "constant":
        if warmup.value:
            why = "the schedule constant has no warm-up and ignores it: say lr_scheduler_type: constant_with_warmup"
            source.refuse("warmup_steps", why)
        return {"schedule.warmup_steps": Setting(0, "default")}
    if 0 < warmup.value < 1:
        return {"schedule.warmup_fraction": warmup}
    return {"schedule.warmup_steps": Setting(int(warmup.value), warmup.origin, warmup.key)}


def _length(source: Source) -> _Settings:
    """The length of the run. By passes over the data, nobody knows it in steps."""
    steps = source.get("max_steps", -1)
    by_epochs = not (isinstance(steps, int | float) and steps > 0)
    if by_epochs and steps in (-1, 0):
        source.keep("max_steps", "the run is as long as num_train_epochs says", harmless=True)
        total = Setting(None, "default")
    else:
        total = source.integer("max_steps", None, low=1)
    if "num_train_epochs" in source.flat:
        why = "the length of the run is counted in passes over the data: set the number of steps"
        source.number("num_train_epochs", 3.0)
        source.keep("num_train_epochs", why if by_epochs else "max_steps decides", harmless=not by_epochs)
    return given_only({"schedule.total_steps": total})


# -- clipping, compile, saving -------------------------------------------------------------------------------------


def _training(source: Source) -> _Settings:
    clip = source.number("max_grad_norm", 1.0)
    by = [key for key in ("torch_compile_backend", "torch_compile_mode") if source.get(key)]
    compiled = source.boolean("torch_compile", False)
    if by and not compiled.value:
        compiled = Setting(True, "file", ", ".join(by))
    found = {
        "training.clip": Setting(clip.value or None, clip.origin, clip.key),
        "training.compile": compiled,
        "training.seed": source.integer("seed", _default("seed")),
        **_checkpointing(source),
    }
    cpu = source.boolean("use_cpu", False)
    return {**found, "training.device": Setting("cpu", "file", cpu.key)} if cpu.value else found


def _checkpointing(source: Source) -> _Settings:
    found = [source.boolean("activation_checkpointing", None, null=True)]
    if source.get("fsdp"):
        found.append(source.boolean("fsdp_config.activation_checkpointing", None, null=True))
    on = any(setting.value for setting in found)
    said = [setting for setting in found if setting.origin == "file"]
    origin: Origin = "file" if said else "default"
    return {"activation_checkpointing.mode": derived("full" if on else "none", *said, origin=origin)}


def _saving(source: Source) -> _Settings:
    strategies = {"no": "no", "steps": "steps", "epoch": "epoch", "best": "best"}
    strategy = source.choice("save_strategy", strategies, "steps")
    steps = source.number("save_steps", _default("save_steps"))
    limit = source.integer("save_total_limit", None, low=1, null=True)
    found = {
        "saving.keep_last": limit,
        **given_only({"saving.folder": source.text("output_dir", None, null=True)}),
        "saving.background": Setting(False, "default"),
    }
    if strategy.value == "steps" and steps.value >= 1:
        return {**found, "saving.every": derived(int(steps.value), steps, strategy, origin=steps.origin)}
    if strategy.origin == "file":
        whys = {"epoch": "a checkpoint after every pass over the data", "best": "a checkpoint when it is better"}
        source.keep("save_strategy", whys.get(strategy.value, ""), harmless=strategy.value in ("no", "steps"))
    if steps.origin == "file":
        by_share = strategy.value == "steps"
        why = "a share of the run whose steps are not known" if by_share else "save_strategy decides"
        source.keep("save_steps", why, harmless=not by_share)
    if strategy.value == "no":
        return {**found, "saving.every": Setting(None, "file", "save_strategy")}
    return found
