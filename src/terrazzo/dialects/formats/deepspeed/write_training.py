"""Writing batch sizes, optimizer, schedule, clipping and what the loop does by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.dialects.core.description import asks_for_nothing
from terrazzo.dialects.core.key_verdict import VerdictKind
from terrazzo.dialects.formats.deepspeed.deepspeed_draft import DeepSpeedDraft
from terrazzo.dialects.formats.deepspeed.keys import (
    BUILT_IN,
    DECAY_LAGS,
    INTERVAL,
    NEUTRAL,
    OPTIMIZER_PARAMS,
    SCHEDULER_PARAMS,
    WARMUP_LAG,
)
from terrazzo.dialects.formats.shared.batch_words import GLOBAL_BATCH_FOLLOWS, size_follows
from terrazzo.dialects.formats.shared.deepspeed_words import BY_PARAMETER
from terrazzo.dialects.formats.shared.schedule_words import warmup_steps, write_lags
from terrazzo.documents.dotted_keys import join

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


def write_batch(draft: DeepSpeedDraft) -> None:
    """Write two of three sizes: the micro-batch, and accumulation or the global batch in its place."""
    sizes = {path: draft.value(path) for path in _BATCH}
    whole, micro, steps = sizes.values()
    key = _BATCH["batch.micro_batch"]
    if micro is None and whole is None:
        why = f"DeepSpeed needs a size, which is left to code here: set {key}, or 'auto' under Hugging Face"
        draft.missing("batch.micro_batch", key, why)
    for path, size in sizes.items():
        if size is None or (path == "batch.global_batch" and micro is not None and steps is not None):
            size_follows(draft, path, GLOBAL_BATCH_FOLLOWS if size is not None else "")
        else:
            draft.put(path, _BATCH[path], size)


# -- optimizer -----------------------------------------------------------------------------------------------------


def write_optimizer(draft: DeepSpeedDraft) -> None:
    """Write the optimizer that the engine builds, if one is named."""
    name = draft.value("optimizer.name")
    if name is None:
        for path in ("lr", "betas", "eps", "weight_decay"):
            if draft.is_set(f"optimizer.{path}"):
                draft.lossy(f"optimizer.{path}", "no optimizer is named: pass one with it to deepspeed.initialize")
        return
    draft.put("optimizer.name", "optimizer.type", _TYPES.get(name, name))
    if name == "Adam":
        draft.write(f"{_PARAMS}.adam_w_mode", False)
    built_in = name in _TYPES
    for path in ("lr", "betas", "eps", "weight_decay"):
        draft.copy(f"optimizer.{path}", f"{_PARAMS}.{path}")
    draft.does("optimizer.decay", "all")
    _options(draft, name, built_in)


def _options(draft: DeepSpeedDraft, name: str, built_in: bool) -> None:
    """Further arguments, as far as the class that DeepSpeed builds takes them."""
    options: Mapping[str, Any] = draft.value("optimizer.options", {})
    dropped = []
    for argument, value in options.items():
        if argument.startswith("muon."):
            dropped += [] if _of_matrices(draft, argument, value) else [argument]
        elif argument in OPTIMIZER_PARAMS or not built_in:
            draft.write(join(_PARAMS, argument), value)
            if argument == "amsgrad" and value:
                draft.write(f"{_PARAMS}.torch_adam", True)  # DeepSpeed's fused kernel has no amsgrad
        elif argument not in _KERNELS:
            dropped.append(argument)
    if dropped:
        draft.lossy("optimizer.options", f"DeepSpeed's {name} takes no {', '.join(dropped)}", _PARAMS)
    else:
        idle = bool(options) and options.keys() <= {*_KERNELS}
        draft.holds("optimizer.options", "how a step is computed, not what" if idle else "", _PARAMS)


def _of_matrices(draft: DeepSpeedDraft, argument: str, value: Any) -> bool:
    """Write what Muon takes for matrices; whether DeepSpeed has it, or does so by itself."""
    if argument in _MUON:
        draft.write(f"{_PARAMS}.{_MUON[argument]}", value)
    return argument in _MUON or _FIXED.get(argument) == value


_MUON = {"muon.lr": "muon_lr", "muon.momentum": "momentum"}
_FIXED = {"muon.adjust_lr": "original", "muon.nesterov": True, "muon.ns_steps": 5}


# -- schedule ------------------------------------------------------------------------------------------------------


def write_schedule(draft: DeepSpeedDraft) -> None:
    """Write the schedule that the engine steps, as far as DeepSpeed has one of that shape."""
    name = draft.value("schedule.name")
    if name is None:
        return
    kinds = {neutral: kind for kind, neutral in NEUTRAL.items()}
    kind = kinds.get(name, name)
    warm_up = _share_in_steps(draft) or int(draft.value("schedule.warmup_steps", 0))
    if kind not in SCHEDULER_PARAMS:
        draft.refuse("schedule.name", f"DeepSpeed has no {name}: pass a torch scheduler to deepspeed.initialize")
    elif name == "constant" and not warm_up:
        draft.holds("schedule.name", "without a schedule the rate stays what it is")
        _no_end(draft)
    elif "total_num_steps" in SCHEDULER_PARAMS[kind] and draft.value("schedule.total_steps") is None:
        draft.refuse("schedule.name", f"{kind} needs the run's length: give it as total_num_steps")
    else:
        draft.put("schedule.name", "scheduler.type", kind)
        _arguments(draft, kind, warm_up)


def _no_end(draft: DeepSpeedDraft) -> None:
    """Say of a schedule that goes on for ever what becomes of the run's length."""
    if draft.value("schedule.total_steps") is not None:
        draft.lossy("schedule.total_steps", "the JSON has no length of the run: your own loop ends it")


def _share_in_steps(draft: DeepSpeedDraft) -> int:
    """Steps of a warm-up that is a share of the run; 0 where it is none, or the run's length is not known."""
    share, total = draft.value("schedule.warmup_fraction"), draft.value("schedule.total_steps")
    return warmup_steps(share, total) if share and total else 0


def _arguments(draft: DeepSpeedDraft, kind: str, warm_up: int) -> None:
    known = SCHEDULER_PARAMS[kind]
    write_lags(draft, WARMUP_LAG if "warmup_num_steps" in known else None, DECAY_LAGS.get(kind, 0))
    if "warmup_num_steps" in known:
        _warm(draft, warm_up)
        _start(draft, known)
    if "total_num_steps" in known:
        _known(draft, "schedule.total_steps", f"{_SCHEDULE}.total_num_steps")
    elif kind == "WarmupLR":
        draft.holds("schedule.final_fraction", "it has no end")
        _no_end(draft)
    _peak_and_end(draft, kind)
    for argument, value in draft.value("schedule.options", {}).items():
        if argument in known or argument == "last_batch_iteration":
            draft.write(f"{_SCHEDULE}.{argument}", value)
    draft.implied("schedule.options", key=_SCHEDULE)


def _warm(draft: DeepSpeedDraft, steps: int) -> None:
    """Write the warm-up, which takes 2 steps at least."""
    key, path, lag = f"{_SCHEDULE}.warmup_num_steps", "schedule.warmup_steps", "schedule.warmup_lag"
    if steps < 2:
        draft.put((path, lag), key, 1, "DeepSpeed warms up over 2 steps at least", "lossy")
    else:
        draft.put(path, key, steps)
    if _share_in_steps(draft):
        draft.holds("schedule.warmup_fraction", "in steps", key)
    if "warmup_type" not in draft.value("schedule.options", {}):
        draft.write(f"{_SCHEDULE}.warmup_type", "linear")


def _start(draft: DeepSpeedDraft, known: Mapping[str, Any]) -> None:
    """Write where warm-up starts: as a share of the peak, or as a rate."""
    path, peak = "schedule.warmup_start", draft.value("optimizer.lr")
    share = draft.value(path)
    if not share:
        draft.implied(path)
    elif "warmup_min_ratio" in known:
        draft.put(path, f"{_SCHEDULE}.warmup_min_ratio", share)
    elif peak:
        draft.put(path, f"{_SCHEDULE}.warmup_min_lr", share * peak)
    else:
        draft.lossy(path, "DeepSpeed takes the rate itself, for which the peak is not known: set warmup_min_lr")


def _peak_and_end(draft: DeepSpeedDraft, kind: str) -> None:
    """The peak is the schedule's own for two of them; the end can be said for the cosine alone."""
    peak = f"{_SCHEDULE}.warmup_max_lr"
    rate = draft.setting("optimizer.lr")
    if kind in ("WarmupLR", "WarmupDecayLR") and rate.value is not None:
        draft.write(peak, rate.value)
    end = draft.value("schedule.final_fraction")
    if kind == "WarmupCosineLR":
        _known(draft, "schedule.final_fraction", f"{_SCHEDULE}.cos_min_ratio")
    elif kind == "WarmupDecayLR" and end:
        draft.lossy("schedule.final_fraction", "DeepSpeed's line ends at 0")
    elif kind == "WarmupDecayLR":
        draft.implied("schedule.final_fraction")


def _known(draft: DeepSpeedDraft, path: str, key: str) -> None:
    if draft.is_set(path):
        draft.put_if_needed(path, key, draft.setting(path).value)


# -- the loop ------------------------------------------------------------------------------------------------------


def write_training(draft: DeepSpeedDraft) -> None:
    """Write clipping, and say what DeepSpeed's JSON cannot."""
    if draft.is_set("training.clip"):
        draft.put_if_needed("training.clip", "gradient_clipping", draft.value("training.clip", 0.0))
    _not_finite(draft)
    if draft.value("training.compile"):
        draft.lossy("training.compile", "call engine.compile() after deepspeed.initialize")
    if draft.has("pipeline.stages") and draft.value("activation_checkpointing.mode") == "full":
        draft.put("activation_checkpointing.mode", INTERVAL, 1)
    elif draft.value("activation_checkpointing.mode", "none") != "none":
        why = "the JSON cannot switch it on: call model.gradient_checkpointing_enable() or wrap the blocks"
        paths = [f"activation_checkpointing.{name}" for name in ("mode", "every", "ops")]
        draft.lossy([path for path in paths if not asks_for_nothing(path, draft.value(path))], why)
    if draft.is_set("activation_checkpointing.offload"):
        draft.put_if_needed(
            "activation_checkpointing.offload",
            "activation_checkpointing.cpu_checkpointing",
            draft.value("activation_checkpointing.offload"),
        )
    _units(draft)


def _not_finite(draft: DeepSpeedDraft) -> None:
    path, word = "training.nonfinite", draft.value("training.nonfinite")
    bf16, scaled = draft.has("bf16.enabled"), draft.has("fp16.enabled")
    if bf16 and word is not None:
        lost = "" if word in ("skip", "go_on") else "DeepSpeed leaves such a step out, and goes on"
        kind: VerdictKind = "lossy" if lost else "applied"
        draft.put(path, "bf16.check_grad_overflow", word != "go_on", lost, kind)
    elif scaled and word == "skip":
        draft.holds(path, "as the loss scale shrinks")
    elif word not in (None, "go_on"):
        draft.lossy(path, f"DeepSpeed {'leaves such a step out' if scaled else 'does not look'}, and goes on")
    if draft.is_set("training.loss_mean"):
        draft.lossy("training.loss_mean", "your own loss is divided by the number of micro-batches there")


def _units(draft: DeepSpeedDraft) -> None:
    draft.holds(["units.policy", "units.classes", "units.min_numel"], BY_PARAMETER)
    if draft.value("units.ignored"):
        draft.lossy("units.ignored", "DeepSpeed splits every parameter")
    if draft.value("loading.low_memory"):
        draft.lossy("loading.low_memory", "build the model within deepspeed.zero.Init()")
    draft.holds("loading.broadcast", "DeepSpeed broadcasts rank 0's weights")
