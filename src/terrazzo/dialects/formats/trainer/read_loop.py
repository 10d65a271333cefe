"""Batch, optimizer, schedule, clipping, saving: what TrainingArguments say of the training loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingOrigin, SettingsByPath
from terrazzo.dialects.core.keys import MISSING, number
from terrazzo.dialects.core.reader import derived, only_from_file
from terrazzo.dialects.core.wording import found
from terrazzo.dialects.formats.trainer.keys import BETA3, DECAY_SHAPES, FIELDS, POLYNOMIAL_END
from terrazzo.dialects.formats.trainer.trainer_reader import TrainerReader
from terrazzo.messages import did_you_mean

__all__ = ["read_loop"]


def read_loop(reader: TrainerReader) -> SettingsByPath:
    """Batch, optimizer, schedule, clipping, seed and saving."""
    schedule = _schedule(reader)
    total = schedule["schedule.total_steps"].value if "schedule.total_steps" in schedule else None
    return {**_batch(reader), **_optimizer(reader), **schedule, **_training(reader), **_saving(reader, total)}


def _batch(reader: TrainerReader) -> SettingsByPath:
    return {
        "batch.micro_batch": reader.take("per_device_train_batch_size"),
        "batch.accumulation": reader.take("gradient_accumulation_steps"),
    }


def _optimizer(reader: TrainerReader) -> SettingsByPath:
    name = reader.take("optim")
    settings: SettingsByPath = {
        "optimizer.name": name,
        "optimizer.lr": reader.take("learning_rate"),
        "optimizer.weight_decay": reader.take("weight_decay"),
        "optimizer.decay": Setting("matrices", "default"),
    }
    plain = name.value in ("SGD", "Adagrad", "RMSprop")
    for key in _OF_ADAM if plain else ("adam_epsilon",) if name.value == "Lion" else ():
        if key in reader.flat:
            reader.refuse(key, f"it is Adam's; {name.value} does not read it: remove it")
    if plain:
        return settings
    first, second = (reader.take(f"adam_beta{each}") for each in (1, 2))
    origin: SettingOrigin = "file" if "file" in (first.origin, second.origin) else "default"
    betas = derived((first.value, second.value), first, second, origin=origin)
    if name.value != "Lion":
        settings["optimizer.eps"] = reader.take("adam_epsilon")
    if name.value != "AdEMAMix":
        return {**settings, "optimizer.betas": betas}
    three = {"optimizer.options": replace(betas, value={"betas": [*betas.value, BETA3]})}
    return {**settings, **only_from_file(three)}


_OF_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")


# -- schedule ------------------------------------------------------------------------------------------------------


def _schedule(reader: TrainerReader) -> SettingsByPath:
    word = str(reader.raw("lr_scheduler_type") or "linear")
    settings: SettingsByPath = {"schedule.name": reader.take("lr_scheduler_type"), **_length(reader)}
    options = _ScheduleOptions(reader.raw("lr_scheduler_kwargs"))
    settings |= _warmup(reader, word) | _shape(reader, word, options)
    settings |= {
        "schedule.warmup_start": _start(word, settings),
        "schedule.warmup_lag": derived(1, reader.take("warmup_steps")),
        "schedule.decay_lag": derived(1, settings["schedule.name"]),
    }
    bent = [] if (left := options.left()) is None else [f"{left}further arguments of Hugging Face's schedule"]
    if bent:
        reader.keep("lr_scheduler_kwargs", "; ".join(bent))
    else:
        reader.keep("lr_scheduler_kwargs", "they say nothing more", loss="harmless")
    return settings


def _start(word: str, settings: Mapping[str, Setting[Any]]) -> Setting[Any]:
    """Where warm-up starts: warmup_stable_decay never goes below its min_lr_ratio."""
    return settings["schedule.final_fraction"] if word == "warmup_stable_decay" else Setting(0.0, "default")


class _ScheduleOptions:
    """Arguments of Hugging Face's schedule, and which of them have been read."""

    def __init__(self, raw: Any) -> None:
        self.given, self.raw = dict(raw) if isinstance(raw, Mapping) else {}, raw
        self._read: set[str] = set()

    def number(self, name: str, default: float) -> Setting[Any]:
        """One of them as a number; the default where it is none."""
        value = number(-math.inf).parse(self.given.get(name))
        if value is MISSING:
            return Setting(default, "default")
        self._read.add(name)
        return Setting(value, "file", "lr_scheduler_kwargs")

    def is_number(self, name: str, default: float) -> bool:
        """Whether it is the default, which then says nothing more; of another number nothing has been read."""
        if self.given.get(name) is None or number(-math.inf).parse(self.given[name]) == default:
            self._read.add(name)
            return True
        return False

    def word(self, name: str, default: str) -> Setting[str]:
        """One of them as text; the default where it is not given."""
        self._read.add(name)
        given = name in self.given
        return Setting(str(self.given[name]), "file", "lr_scheduler_kwargs") if given else Setting(default, "default")

    def left(self) -> str | None:
        """Names of those that nobody has read and that say something, and a colon; None where there are none."""
        if self.raw is not None and not isinstance(self.raw, Mapping):
            return ""
        names = [str(name) for name, value in self.given.items() if name not in self._read and value is not None]
        return f"{', '.join(names)}: " if names else None


def _shape(reader: TrainerReader, word: str, options: _ScheduleOptions) -> SettingsByPath:
    """Where the learning rate ends, and how it gets there."""
    peak = reader.take("learning_rate").value or FIELDS["learning_rate"].default
    final = "schedule.final_fraction"
    if word == "cosine_with_min_lr":
        if options.given.get("min_lr") is None:
            return {final: options.number("min_lr_rate", 0.0)}
        lowest = options.number("min_lr", 0.0)
        return {final: Setting(lowest.value / peak, lowest.origin, lowest.key)}
    if word == "polynomial" and options.is_number("power", 1.0):
        end = options.number("lr_end", POLYNOMIAL_END)
        line = Setting("linear", "file", "lr_scheduler_type")
        return {"schedule.name": line, final: Setting(end.value / peak, end.origin, end.key)}
    if word == "warmup_stable_decay":
        return _stable(reader, options)
    return {final: Setting(0.0, "default")} if word in ("linear", "cosine") else {}


def _stable(reader: TrainerReader, options: _ScheduleOptions) -> SettingsByPath:
    decay, word = options.number("num_decay_steps", 0), options.word("decay_type", "cosine")
    settings: SettingsByPath = {"schedule.final_fraction": options.number("min_lr_ratio", 0.0)}
    if word.value in DECAY_SHAPES:
        settings["schedule.decay_shape"] = replace(word, value=DECAY_SHAPES[word.value])
    else:
        known = f"{', '.join(DECAY_SHAPES)}.{did_you_mean(word.value, DECAY_SHAPES)}"
        reader.refuse("lr_scheduler_kwargs", f"decay_type is {found(word.value)}, expected {known}")
    if decay.value:
        settings["schedule.decay_steps"] = Setting(int(decay.value), "file", decay.key)
    return settings


def _warmup(reader: TrainerReader, word: str) -> SettingsByPath:
    warmup = reader.take("warmup_steps")
    if word == "constant":
        if warmup.value:
            why = "the schedule constant has no warm-up and ignores it: say lr_scheduler_type: constant_with_warmup"
            reader.refuse("warmup_steps", why)
        return {"schedule.warmup_steps": Setting(0, "default")}
    if 0 < warmup.value < 1:
        return {"schedule.warmup_fraction": warmup}
    return {"schedule.warmup_steps": Setting(int(warmup.value), warmup.origin, warmup.key)}


def _length(reader: TrainerReader) -> SettingsByPath:
    """The length of the run. By passes over the data, nobody knows it in steps."""
    total = reader.take("max_steps")
    if total.value is None and total.origin == "file":
        reader.keep("max_steps", "the run is as long as num_train_epochs says", loss="harmless")
    if "num_train_epochs" in reader.flat:
        reader.take("num_train_epochs")
        if total.value is None:
            why = "the length of the run is counted in passes over the data: set the number of steps"
            reader.keep("num_train_epochs", why)
        else:
            reader.keep("num_train_epochs", "max_steps decides", loss="harmless")
    return only_from_file({"schedule.total_steps": total}) if total.value else {}


# -- clipping, compile, saving -------------------------------------------------------------------------------------


def _training(reader: TrainerReader) -> SettingsByPath:
    clip = reader.take("max_grad_norm")
    by = [key for key in ("torch_compile_backend", "torch_compile_mode") if reader.raw(key)]
    compiled = reader.take("torch_compile")
    if by and not compiled.value:
        compiled = Setting(True, "file", ", ".join(by))
    settings = {
        "training.clip": Setting(clip.value or None, clip.origin, clip.key),
        "training.compile": compiled,
        "training.seed": reader.take("seed"),
        **_loss(reader),
        **_checkpointing(reader),
    }
    cpu = reader.take("use_cpu")
    return {**settings, "training.device": Setting("cpu", "file", cpu.key)} if cpu.value else settings


def _loss(reader: TrainerReader) -> SettingsByPath:
    """What it is the mean over; one that is not finite is learnt from, but where fp16's scale shrinks."""
    every = reader.take("average_tokens_across_devices")
    mean = Setting("tokens" if every.value else "rank_tokens", every.origin, every.key)
    goes_on: SettingsByPath = {"training.nonfinite": Setting("go_on", "default")}
    return {"training.loss_mean": mean, **({} if reader.take("fp16").value else goes_on)}


def _checkpointing(reader: TrainerReader) -> SettingsByPath:
    switches = [reader.take("activation_checkpointing")]
    if reader.raw("fsdp"):
        switches.append(reader.take("fsdp_config.activation_checkpointing"))
    on = any(setting.value for setting in switches)
    from_file = [setting for setting in switches if setting.origin == "file"]
    origin: SettingOrigin = "file" if from_file else "default"
    return {"activation_checkpointing.mode": derived("full" if on else "none", *from_file, origin=origin)}


def _saving(reader: TrainerReader, total: int | None) -> SettingsByPath:
    """What is saved, and how often: by steps, or by a share of the run's `total` steps, rounded up."""
    strategy = reader.take("save_strategy")
    steps = reader.take("save_steps")
    settings = {
        "saving.keep_last": reader.take("save_total_limit"),
        **only_from_file({"saving.folder": reader.take("output_dir")}),
        "saving.background": Setting(False, "default"),
    }
    said = "file" in (strategy.origin, steps.origin)
    when = derived("steps", strategy, steps, origin="file" if said else "default")
    settings["saving.when"] = when
    if strategy.value == "steps" and steps.value >= 1:
        if steps.value != int(steps.value):
            reader.refuse("save_steps", "above 1 TrainingArguments raise for what is no whole number of steps")
        return {**settings, "saving.every": derived(int(steps.value), steps, strategy, origin=steps.origin)}
    if strategy.value == "steps" and steps.value > 0 and total is not None:
        return {**settings, "saving.every": derived(math.ceil(total * steps.value), steps, strategy, origin="file")}
    if strategy.value == "steps" and steps.value == 0:  # the Trainer never saves then
        return {**settings, "saving.when": replace(when, value="never")}
    if strategy.origin == "file":
        whys = {"epoch": "a checkpoint after every pass over the data", "best": "a checkpoint when it is better"}
        reader.keep(
            "save_strategy", whys.get(strategy.value, ""), loss="lossy" if strategy.value in whys else "harmless"
        )
    if steps.origin == "file":
        by_share = strategy.value == "steps"
        why = "a share of the run whose steps are not known" if by_share else "save_strategy decides"
        reader.keep("save_steps", why, loss="lossy" if by_share else "harmless")
    if strategy.value == "no":
        return {**settings, "saving.when": Setting("never", "file", "save_strategy")}
    return {**settings, "saving.when": replace(when, key=strategy.key)}
