"""Writing batch sizes, optimizer, schedule, clipping and what the loop does by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.deepspeed.keys import OPTIMIZER_PARAMS, SCHEDULER_PARAMS
from terrazzo.dialects.deepspeed.pen import Pen
from terrazzo.dialects.deepspeed.read_schedule import NEUTRAL
from terrazzo.dialects.deepspeed.read_training import BUILT_IN
from terrazzo.dialects.description import inactive
from terrazzo.dialects.reader import join

__all__ = ["write_batch", "write_optimizer", "write_schedule", "write_training"]

_BATCH = {
    "batch.global_batch": "train_batch_size",
    "batch.micro_batch": "train_micro_batch_size_per_gpu",
    "batch.accumulation": "gradient_accumulation_steps",
}
_PARAMS, _SCHEDULE = "optimizer.params", "scheduler.params"
_KERNELS = ("fused", "foreach", "capturable", "differentiable")
_TYPES = {**{name: name for name in BUILT_IN.values()}, "Adam": "Adam"}


# -- batch ---------------------------------------------------------------------------------------------------------


def write_batch(pen: Pen) -> None:
    """Write two of three sizes: DeepSpeed works out the third from the number of ranks."""
    sizes = {path: pen.value(path) for path in _BATCH}
    for path, key in _BATCH.items():
        if pen.own and pen.setting(path).origin == "auto":
            pen.option(path, key, sizes[path])
        elif pen.own and sizes[path] is not None and pen.stood(path, key) and pen.setting(path).origin == "file":
            pen.put(path, key, sizes[path])
        elif pen.own:
            pen.implied(path, "DeepSpeed works it out")
    if not pen.own:
        _two(pen, sizes)


def _two(pen: Pen, sizes: dict[str, Any]) -> None:
    """The micro-batch, and what else is known: accumulation, or the global batch in its place."""
    whole, micro, steps = sizes.values()
    key = _BATCH["batch.micro_batch"]
    if micro is None and whole is None:
        why = f"DeepSpeed needs a size, which is left to code here: set {key}, or 'auto' under Hugging Face"
        pen.missing("batch.micro_batch", key, why)
    for path, size in sizes.items():
        if size is None or (path == "batch.global_batch" and micro is not None and steps is not None):
            pen.implied(path, "micro-batch × accumulation × ranks" if size is not None else "")
        else:
            pen.put(path, _BATCH[path], size)


# -- optimizer -----------------------------------------------------------------------------------------------------


def write_optimizer(pen: Pen) -> None:
    """Write the optimizer that the engine builds, if one is named."""
    name = pen.value("optimizer.name")
    if name is None:
        for path in ("lr", "betas", "eps", "weight_decay"):
            if pen.is_set(f"optimizer.{path}"):
                pen.lossy(f"optimizer.{path}", "no optimizer is named: pass one with it to deepspeed.initialize")
        return
    pen.put("optimizer.name", "optimizer.type", pen.kept.get("optimizer.type", _TYPES.get(name, name)))
    if name == "Adam":
        pen.write(f"{_PARAMS}.adam_w_mode", False)
    built_in = name in _TYPES
    for path in ("lr", "betas", "eps", "weight_decay"):
        _number(pen, f"optimizer.{path}", f"{_PARAMS}.{path}", built_in)
    _options(pen, name, built_in)


def _number(pen: Pen, path: str, key: str, built_in: bool) -> None:
    """A rate or factor, unless it is DeepSpeed's own default, or the schedule's."""
    setting = pen.setting(path)
    if not setting.is_set or (path == "optimizer.lr" and pen.own and setting.keys and key not in setting.keys):
        pen.implied(path, key=setting.key)
    elif setting.origin == "auto" or pen.own:
        if key in setting.keys:
            pen.option(path, key, _plain(setting.value))
        else:
            pen.implied(path)
    elif setting.value is not None:
        pen.put(path, key, _plain(setting.value))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _options(pen: Pen, name: str, built_in: bool) -> None:
    """Further arguments, as far as the class that DeepSpeed builds takes them."""
    options: Mapping[str, Any] = pen.value("optimizer.options", {})
    dropped = []
    for argument, value in options.items():
        if pen.own or argument in OPTIMIZER_PARAMS or not built_in:
            pen.write(join(_PARAMS, argument), value)
            if argument == "amsgrad" and value and not pen.own:
                pen.write(f"{_PARAMS}.torch_adam", True)  # DeepSpeed's fused kernel has no amsgrad
        elif argument not in _KERNELS:
            dropped.append(argument)
    if dropped:
        pen.lossy("optimizer.options", f"DeepSpeed's {name} takes no {', '.join(dropped)}", _PARAMS)
    else:
        pen.implied("optimizer.options", key=_PARAMS)


# -- schedule ------------------------------------------------------------------------------------------------------


def write_schedule(pen: Pen) -> None:
    """Write the schedule that the engine steps, as far as DeepSpeed has one of that shape."""
    name = pen.value("schedule.name")
    if name is None:
        return
    kinds = {neutral: kind for kind, neutral in NEUTRAL.items()}
    kind = kinds.get(name, name)
    warm_up = _warm_up(pen)
    if kind not in SCHEDULER_PARAMS:
        pen.refuse("schedule.name", f"DeepSpeed has no {name}: pass a torch scheduler to deepspeed.initialize")
    elif name == "constant" and not warm_up and not pen.own:
        pen.implied("schedule.name", "without a schedule the rate stays what it is")
        pen.implied("schedule.total_steps")
    elif "total_num_steps" in SCHEDULER_PARAMS[kind] and not _has_total(pen):
        pen.refuse("schedule.name", f"{kind} needs the run's length: give it as total_num_steps")
    else:
        pen.put("schedule.name", "scheduler.type", kind)
        _arguments(pen, kind, warm_up)


def _has_total(pen: Pen) -> bool:
    return pen.own or pen.value("schedule.total_steps") is not None


def _warm_up(pen: Pen) -> int:
    """Steps of warm-up, also from a share of the run."""
    total: int | None = pen.value("schedule.total_steps")
    share: float | None = pen.value("schedule.warmup_fraction")
    if share and total:
        pen.implied("schedule.warmup_fraction", "in steps", f"{_SCHEDULE}.warmup_num_steps")
        return round(share * total)
    return int(pen.value("schedule.warmup_steps", 0))


def _arguments(pen: Pen, kind: str, warm_up: int) -> None:
    known = SCHEDULER_PARAMS[kind]
    if "warmup_num_steps" in known:
        _warm(pen, warm_up)
    if "total_num_steps" in known:
        _known(pen, "schedule.total_steps", f"{_SCHEDULE}.total_num_steps")
    elif kind == "WarmupLR":
        pen.implied(["schedule.total_steps", "schedule.final_fraction"], "it has no end")
    _peak_and_end(pen, kind)
    for argument, value in pen.value("schedule.options", {}).items():
        key = f"{_SCHEDULE}.{argument}"
        if pen.own and key not in pen.setting("schedule.options").keys:
            continue  # a default
        if argument in known or argument == "last_batch_iteration":
            pen.write(key, value)
    pen.implied("schedule.options", key=_SCHEDULE)


def _warm(pen: Pen, steps: int) -> None:
    """Write the warm-up, which takes 2 steps at least."""
    key, path = f"{_SCHEDULE}.warmup_num_steps", "schedule.warmup_steps"
    if pen.own:
        if key in pen.setting(path).keys and key not in pen.kept:
            pen.option(path, key, steps)
        else:
            pen.implied(path, key=key)
        return
    if steps < 2:
        pen.put(path, key, 1, "DeepSpeed warms up over 2 steps at least", "lossy")
    else:
        pen.put(path, key, steps)
    if "warmup_type" not in pen.value("schedule.options", {}):
        pen.write(f"{_SCHEDULE}.warmup_type", "linear")


def _peak_and_end(pen: Pen, kind: str) -> None:
    """The peak is the schedule's own for two of them; the end can be said for the cosine alone."""
    peak = f"{_SCHEDULE}.warmup_max_lr"
    rate = pen.setting("optimizer.lr")
    if peak in rate.keys and pen.own:
        pen.option("optimizer.lr", peak, rate.value)
    elif kind in ("WarmupLR", "WarmupDecayLR") and not pen.own and rate.value is not None:
        pen.write(peak, rate.value)
    end = pen.value("schedule.final_fraction")
    if kind == "WarmupCosineLR":
        _known(pen, "schedule.final_fraction", f"{_SCHEDULE}.cos_min_ratio")
    elif kind == "WarmupDecayLR" and end:
        pen.lossy("schedule.final_fraction", "DeepSpeed's line ends at 0")
    elif kind == "WarmupDecayLR":
        pen.implied("schedule.final_fraction")


def _known(pen: Pen, path: str, key: str) -> None:
    setting = pen.setting(path)
    if pen.own and key not in setting.keys:
        pen.implied(path)
    elif setting.is_set:
        pen.option(path, key, setting.value)


# -- the loop ------------------------------------------------------------------------------------------------------


def write_training(pen: Pen) -> None:
    """Write clipping, and say what DeepSpeed's JSON cannot."""
    if pen.is_set("training.clip"):
        pen.option("training.clip", "gradient_clipping", pen.value("training.clip", 0.0))
    compiled = "compile.deepcompile"
    if pen.own and pen.is_set("training.compile"):
        pen.option("training.compile", compiled, pen.value("training.compile"))
    elif pen.value("training.compile"):
        pen.lossy("training.compile", "call engine.compile() after deepspeed.initialize")
    if pen.value("activation_checkpointing.mode", "none") != "none":
        why = "the JSON cannot switch it on: call model.gradient_checkpointing_enable() or wrap the blocks"
        paths = [f"activation_checkpointing.{name}" for name in ("mode", "every", "ops")]
        pen.lossy([path for path in paths if not inactive(path, pen.value(path))], why)
    if pen.is_set("activation_checkpointing.offload"):
        pen.option(
            "activation_checkpointing.offload",
            "activation_checkpointing.cpu_checkpointing",
            pen.value("activation_checkpointing.offload"),
        )
    _units(pen)


def _units(pen: Pen) -> None:
    pen.implied(["units.policy", "units.classes", "units.min_numel"], "DeepSpeed gathers parameter by parameter")
    if pen.value("units.ignored"):
        pen.lossy("units.ignored", "DeepSpeed splits every parameter")
    if pen.value("loading.low_memory"):
        pen.lossy("loading.low_memory", "build the model within deepspeed.zero.Init()")
    pen.implied("loading.broadcast", "DeepSpeed broadcasts rank 0's weights")
