"""Writing what TrainingArguments say of the training loop."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.agreement import has_no_effect
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.shared.batch_words import GLOBAL_BATCH_FOLLOWS, size_follows
from terrazzo.dialects.formats.shared.schedule_words import write_lags
from terrazzo.dialects.formats.trainer.keys import BETA3, DECAY_SHAPES, EIGHT_BITS, FIELDS, OPTIMIZERS, OWN_SCHEDULES

__all__ = ["write_loop", "write_schedule"]

_PLAIN = {
    "batch.micro_batch": "per_device_train_batch_size",
    "batch.accumulation": "gradient_accumulation_steps",
    "optimizer.lr": "learning_rate",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.eps": "adam_epsilon",
    "schedule.total_steps": "max_steps",
    "training.seed": "seed",
    "saving.folder": "output_dir",
    "saving.keep_last": "save_total_limit",
}


def write_loop(draft: Draft) -> None:
    """Batch, optimizer, the run's length and warm-up, clipping, compile, seed, saving."""
    for path, key in _PLAIN.items():
        _field(draft, path, key)
    _batch(draft)
    _betas(draft)
    _warmup(draft)
    if draft.is_set("training.clip"):
        _field(draft, "training.clip", "max_grad_norm", draft.value("training.clip", 0))
    _optimizer(draft)
    _saving(draft)
    _switches(draft)


def _field(draft: Draft, path: str, key: str, value: Any = None) -> None:
    """A setting that is one field, or a part of one."""
    setting = draft.setting(path)
    if not setting.is_set:
        return
    wanted = setting.value if value is None else value
    # what the source says is said, too, where the Trainer's default is the same today
    if wanted is not None and (setting.keys or wanted != FIELDS[key].default):
        draft.put(path, key, list(wanted) if isinstance(wanted, tuple) else wanted)
    else:
        draft.implied(path)


def _batch(draft: Draft) -> None:
    size_follows(draft, "batch.global_batch", GLOBAL_BATCH_FOLLOWS)
    whole, micro, count = (draft.value(f"batch.{name}") for name in ("global_batch", "micro_batch", "accumulation"))
    if whole is not None and not (micro and count):
        need = "accumulation" if micro else "the micro-batch"
        why = f"the Trainer has no global batch, and {need} does not follow without the number of ranks: say --world"
        draft.lossy("batch.global_batch", why)
    if draft.value("batch.sequence_length") is not None:
        draft.lossy("batch.sequence_length", "the length of sequences is that of the data there")


def _betas(draft: Draft) -> None:
    path, three = "optimizer.betas", draft.value("optimizer.options", {}).get("betas")
    if draft.value("optimizer.name") == "AdEMAMix" and three:
        path = "optimizer.options"
    setting, values = draft.setting(path), three if path == "optimizer.options" else draft.value(path)
    draft.implied(path)
    for key, value in zip(("adam_beta1", "adam_beta2"), values or (), strict=False):
        if setting.keys or value != FIELDS[key].default:
            draft.put(path, key, value)


def _warmup(draft: Draft) -> None:
    for path in ("schedule.warmup_steps", "schedule.warmup_fraction"):
        if draft.value(path) is not None and not (path.endswith("steps") and draft.has("warmup_steps")):
            _field(draft, path, "warmup_steps")


def _optimizer(draft: Draft) -> None:
    name, path = draft.value("optimizer.name"), "optimizer.name"
    narrow = draft.value("precision.moments") == "int8" and name in (*EIGHT_BITS.values(), "Adam")
    if narrow:
        codes = "codes of 8 bits have other values there, and small tensors have none"
        draft.lossy("precision.moments", codes, "optim")
    words = {name: word for word, name in reversed((EIGHT_BITS if narrow else OPTIMIZERS).items())}
    if name is None:
        return
    draft.does("optimizer.decay", "matrices")
    if name in words:
        draft.put(path, "optim", words[name])
    elif name == "Adam" and not draft.value("optimizer.weight_decay"):
        draft.write("optim", words["AdamW"])
        draft.holds(path, "without weight decay AdamW is Adam", "optim")
    elif name == "Adam":
        why = "the Trainer has AdamW only: weight decay is not mixed into the gradient"
        draft.put(path, "optim", words["AdamW"], why, "lossy")
    else:
        draft.refuse(path, f"the Trainer has no optim for {name}: pass your own optimizer to it")
    options = {
        key: value for key, value in draft.value("optimizer.options", {}).items() if key not in ("fused", "foreach")
    }
    if name == "AdEMAMix" and options.get("betas", (BETA3,))[-1] == BETA3:
        options.pop("betas", None)
    if options:
        draft.lossy("optimizer.options", f"no field for {', '.join(options)}: pass your own optimizer")
    elif not draft.has_verdict("optimizer.options"):
        draft.holds("optimizer.options", "how a step is computed, not what")


# -- schedule ------------------------------------------------------------------------------------------------------


def write_schedule(draft: Draft) -> None:
    """The rate over the run, as the Trainer makes it; its length and warm-up are written by `write_loop`."""
    name, final = draft.value("schedule.name"), draft.value("schedule.final_fraction", 0.0)
    paths = ("schedule.name", "schedule.final_fraction")
    kind, options = "lr_scheduler_type", "lr_scheduler_kwargs"
    write_lags(draft, 1, 1)
    level = name == "linear" and final == 1.0  # polynomial raises on a line that does not fall
    if name == "constant" or level:
        warm = draft.value("schedule.warmup_steps") or draft.value("schedule.warmup_fraction")
        why = "a line to the peak itself stays there" if level else ""
        draft.write(kind, "constant_with_warmup" if warm else "constant")
        draft.holds(paths, why, kind)
    elif name in ("linear", "cosine") and not final:
        draft.put(paths, kind, name)
    elif name == "cosine":
        draft.put(paths, kind, "cosine_with_min_lr")
        draft.write(options, {"min_lr_rate": final})
    elif name == "linear":
        draft.put(paths, kind, "polynomial")
        draft.write(
            options, {"power": 1.0, "lr_end": draft.value("optimizer.lr", FIELDS["learning_rate"].default) * final}
        )
    elif name == "wsd":
        _stable(draft, final)
    elif name in OWN_SCHEDULES:
        draft.put("schedule.name", kind, name)
    elif name is not None:
        draft.lossy("schedule.name", f"the Trainer has no schedule {name}: it decays linearly", kind)


def _stable(draft: Draft, final: float) -> None:
    total, decay = draft.value("schedule.total_steps"), draft.value("schedule.decay_steps")
    if decay is None and total is None:
        draft.lossy(
            "schedule.name", "the length of the decay is not known: set schedule.decay_steps", "lr_scheduler_type"
        )
        return
    kind, options = "lr_scheduler_type", "lr_scheduler_kwargs"
    shape, words = draft.value("schedule.decay_shape", "linear"), {known: word for word, known in DECAY_SHAPES.items()}
    arguments = {"num_decay_steps": decay or max(1, total // 5), "decay_type": words.get(shape, "linear")}
    draft.put(("schedule.name", "schedule.final_fraction"), kind, "warmup_stable_decay")
    draft.put(("schedule.decay_steps", "schedule.decay_shape"), options, {**arguments, "min_lr_ratio": final})
    start, path = draft.value("schedule.warmup_start", 0.0), "schedule.warmup_start"
    if final != start and not has_no_effect(draft.description, path):
        draft.lossy(path, f"warm-up starts at min_lr_ratio there, {final:g}, not at {start:g} of the peak", options)
    else:
        draft.implied(path, key=options)
    if shape not in words:
        draft.lossy("schedule.decay_shape", f"the final decay is {', '.join(DECAY_SHAPES)} there: linear", options)


# -- the rest ------------------------------------------------------------------------------------------------------


def _saving(draft: Draft) -> None:
    """Write how often; every so many steps is at the end, too."""
    when, every, total = (draft.value(path) for path in ("saving.when", "saving.every", "schedule.total_steps"))
    if when == "never":
        draft.put("saving.when", "save_strategy", "no", "the Trainer saves every 500 steps unless it is told not to")
    elif when == "end" and total:
        draft.put("saving.when", "save_steps", total, "the run's steps: one checkpoint, at the end")
    elif when == "end":
        draft.lossy("saving.when", "the length of the run is not known: set save_steps to it")
    elif every is not None:
        draft.implied("saving.when", key="save_steps")
        _field(draft, "saving.every", "save_steps")
    elif when == "steps":
        draft.lossy("saving.when", "how often is not known: set save_steps, which is 500 by default")
    if draft.value("saving.background"):
        draft.lossy("saving.background", "the Trainer waits until a checkpoint is written")


def _switches(draft: Draft) -> None:
    _field(draft, "training.compile", "torch_compile")
    mean = draft.value("training.loss_mean")
    if mean in ("tokens", "rank_tokens"):
        _field(draft, "training.loss_mean", "average_tokens_across_devices", mean == "tokens")
    else:
        draft.does("training.loss_mean", "tokens")
    draft.does("training.nonfinite", "go_on")
    if draft.value("training.device") == "cpu":
        draft.put("training.device", "use_cpu", True)
    else:
        draft.holds("training.device", "a GPU where there is one")
