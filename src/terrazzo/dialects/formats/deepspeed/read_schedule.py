"""Reading the learning-rate schedule that the engine steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByPath
from terrazzo.dialects.core.keys import integer, number
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.formats.deepspeed.deepspeed_reader import DeepSpeedReader
from terrazzo.dialects.formats.deepspeed.keys import DECAY_LAGS, NEUTRAL, SCHEDULER_PARAMS, WARMUP_LAG
from terrazzo.dialects.formats.deepspeed.versions import STRICT_WARMUP
from terrazzo.messages import did_you_mean

__all__ = ["read_schedule"]


_PARAMS = "scheduler.params"


def read_schedule(reader: DeepSpeedReader) -> SettingsByPath:
    """The schedule; nothing where the code passes one."""
    name = reader.take("scheduler.type")
    if name.value is None:
        return {}
    if name.value not in SCHEDULER_PARAMS:
        near = did_you_mean(name.value, SCHEDULER_PARAMS)
        reader.refuse(name.key, f"DeepSpeed has no such schedule: it has {', '.join(SCHEDULER_PARAMS)}.{near}")
        return {}
    settings: SettingsByPath = {"schedule.name": Setting(NEUTRAL.get(name.value, name.value), "file", name.key)}
    if name.value in NEUTRAL:
        settings |= _warm_up(reader, SCHEDULER_PARAMS[name.value]) | _end(reader, name.value)
        settings |= _lags(settings["schedule.warmup_steps"], name) | _start(reader, name.value, settings)
    return settings | _options(reader, name)


def _warm_up(reader: DeepSpeedReader, usual: Mapping[str, Any]) -> SettingsByPath:
    """The steps of the warm-up: 2 at least, whatever is asked."""
    key = f"{_PARAMS}.warmup_num_steps"
    least = 1 if reader.version >= STRICT_WARMUP else 0
    steps = reader.take_as(key, integer(least), usual["warmup_num_steps"])
    if steps.origin == "auto" and steps.value is not None:
        return {"schedule.warmup_steps": Setting(max(2, steps.value), "auto", key)}
    if steps.origin == "file" and steps.value < 2:
        reader.mark(key, "lossy", "DeepSpeed warms up over 2 steps at least")
        return {"schedule.warmup_steps": Setting(2, "derived", key)}
    return {"schedule.warmup_steps": steps}


def _lags(warm_up: Setting[Any], name: Setting[str]) -> SettingsByPath:
    return {
        "schedule.warmup_lag": derived(WARMUP_LAG, warm_up if warm_up.key else name),
        "schedule.decay_lag": derived(DECAY_LAGS.get(name.value, 0), name),
    }


def _start(reader: DeepSpeedReader, name: str, settings: Mapping[str, Setting[Any]]) -> SettingsByPath:
    """Where warm-up starts, of the peak. A rate for each group, or of an unknown peak, is left to the options."""
    path = "schedule.warmup_start"
    if "warmup_min_ratio" in SCHEDULER_PARAMS[name]:
        return {path: reader.take_as(f"{_PARAMS}.warmup_min_ratio", number(high=1.0), 0.0)}
    key, peak = f"{_PARAMS}.warmup_min_lr", settings.get("optimizer.lr", Setting(None, "default")).value
    if isinstance(reader.raw(key), list) or (not peak and reader.raw(key)):
        return {}
    rate = reader.take_as(key, number(), 0.0, null=True)
    return {path: derived((rate.value or 0.0) / peak if peak else 0.0, rate, origin=rate.origin)}


def _end(reader: DeepSpeedReader, name: str) -> SettingsByPath:
    usual = SCHEDULER_PARAMS[name]
    if name == "WarmupLR":
        return _peak(reader, usual["warmup_max_lr"])
    total = reader.take_as(f"{_PARAMS}.total_num_steps", integer(1))
    settings: SettingsByPath = {"schedule.total_steps": total} if total.origin != "default" else {}
    if name == "WarmupDecayLR":
        return settings | {"schedule.final_fraction": Setting(0.0, "default")} | _peak(reader, usual["warmup_max_lr"])
    end = reader.take_as(f"{_PARAMS}.cos_min_ratio", number(high=1.0), usual["cos_min_ratio"])
    return settings | {"schedule.final_fraction": end}


def _peak(reader: DeepSpeedReader, default: float | None) -> SettingsByPath:
    """The schedule's own peak, which holds rather than the optimizer's rate."""
    key, rate = f"{_PARAMS}.warmup_max_lr", "optimizer.params.lr"
    if not isinstance(reader.raw(key), int | float | str | None):
        return {}
    peak = reader.take_as(key, number(), default, null=True)
    if peak.value is None and peak.origin != "auto":
        return {}
    optimizer_rate = reader.take_as(rate, number()) if reader.raw(rate) is not None else None
    if optimizer_rate is None:
        return {"optimizer.lr": peak}
    if peak.value is not None and optimizer_rate.origin == "file" and optimizer_rate.value != peak.value:
        reader.mark(rate, "lossy", f"the schedule's warmup_max_lr holds instead: {peak.value:g}")
        reader.keep(rate, "the schedule's warmup_max_lr holds instead", loss="harmless")
        return {"optimizer.lr": peak}
    return {"optimizer.lr": Setting(peak.value, peak.origin, ", ".join((*peak.keys, rate)))}


def _options(reader: DeepSpeedReader, name: Setting[Any]) -> SettingsByPath:
    """What else bends the curve: the shape of the warm-up, its start, and all of a schedule of DeepSpeed's own."""
    arguments = SCHEDULER_PARAMS[name.value]
    options: dict[str, Any] = {}
    keys: list[str] = []
    if "warmup_type" in arguments and reader.raw(f"{_PARAMS}.warmup_type", "log") == "log":
        options["warmup_type"] = "log"
        keys.append(name.key)
    for key in [key for key in reader.unread() if key.startswith(f"{_PARAMS}.")]:
        argument = key.removeprefix(f"{_PARAMS}.")
        if argument not in arguments and argument != "last_batch_iteration":
            near = did_you_mean(argument, arguments)
            reader.refuse(key, f"{name.value} takes no such argument.{near}")
            continue
        value = reader.take(key).value
        if argument == "warmup_type" and value not in ("log", "linear"):
            reader.refuse(key, "expected log or linear; DeepSpeed takes log")
        elif value == arguments.get(argument, -1) and argument != "warmup_type":
            reader.keep(key, "the default", loss="harmless")
        elif argument != "warmup_type":
            options[argument] = value
            keys.append(key)
        elif value == "linear":
            reader.keep(key, "the neutral shape", loss="harmless")
        else:
            keys.append(key)
    return {"schedule.options": Setting(options, "file", ", ".join(keys))} if options else {}
