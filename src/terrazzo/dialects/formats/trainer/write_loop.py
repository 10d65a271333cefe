"""Writing what TrainingArguments say of the training loop."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.draft import Pen
from terrazzo.dialects.formats.trainer.keys import EIGHT_BITS, FIELDS, OPTIMIZERS, OWN_SCHEDULES

__all__ = ["write_loop"]

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


def write_loop(pen: Pen) -> None:
    """Batch, optimizer, schedule, clipping, compile, seed, saving."""
    for path, key in _PLAIN.items():
        _field(pen, path, key)
    _batch(pen)
    _betas(pen)
    _warmup(pen)
    if pen.is_set("training.clip"):
        _field(pen, "training.clip", "max_grad_norm", pen.value("training.clip", 0))
    if not pen.own:
        _optimizer(pen)
        _schedule(pen)
        _saving(pen)
        _switches(pen)
    else:
        _field(pen, "saving.every", "save_steps")
        _field(pen, "training.device", "use_cpu", pen.value("training.device") == "cpu")
        pen.implied(("batch.global_batch", "batch.sequence_length"))


def _field(pen: Pen, path: str, key: str, value: Any = None) -> None:
    """A setting that is one field, or a part of one."""
    setting = pen.setting(path)
    if not setting.is_set:
        return
    said = setting.value if value is None else value
    if pen.own:
        wanted = key in setting.keys and setting.origin != "default"
    else:  # what the source says is said, too, where the Trainer's default is the same today
        wanted = said is not None and (bool(setting.keys) or said != FIELDS[key].default)
    if wanted:
        pen.put(path, key, list(said) if isinstance(said, tuple) else said)
    else:
        pen.implied(path)


def _batch(pen: Pen) -> None:
    pen.implied("batch.global_batch", "it follows from the micro-batch, accumulation and the number of ranks")
    whole, micro, count = (pen.value(f"batch.{name}") for name in ("global_batch", "micro_batch", "accumulation"))
    if whole is not None and not (micro and count):
        need = "accumulation" if micro else "the micro-batch"
        why = f"the Trainer has no global batch, and {need} does not follow without the number of ranks: say --world"
        pen.lossy("batch.global_batch", why)
    if pen.value("batch.sequence_length") is not None:
        pen.lossy("batch.sequence_length", "the length of sequences is that of the data there")


def _betas(pen: Pen) -> None:
    setting = pen.setting("optimizer.betas")
    if setting.value is None:
        return
    pen.implied("optimizer.betas")
    for key, value in zip(("adam_beta1", "adam_beta2"), setting.value, strict=True):
        if key in setting.keys if pen.own else setting.keys or value != FIELDS[key].default:
            pen.put("optimizer.betas", key, value)


def _warmup(pen: Pen) -> None:
    for path in ("schedule.warmup_steps", "schedule.warmup_fraction"):
        if pen.value(path) is not None and not (path.endswith("steps") and pen.has("warmup_steps")):
            _field(pen, path, "warmup_steps")


def _optimizer(pen: Pen) -> None:
    name, path = pen.value("optimizer.name"), "optimizer.name"
    narrow = pen.own and pen.value("precision.moments") == "int8"
    words = {name: word for word, name in reversed((EIGHT_BITS if narrow else OPTIMIZERS).items())}
    if name is None:
        return
    if name in words:
        pen.put(path, "optim", words[name])
    elif name == "Adam" and not pen.value("optimizer.weight_decay"):
        pen.put(path, "optim", words["AdamW"], "without weight decay AdamW is Adam")
    elif name == "Adam":
        why = "the Trainer has AdamW only: weight decay is not mixed into the gradient"
        pen.put(path, "optim", words["AdamW"], why, "lossy")
    else:
        pen.refuse(path, f"the Trainer has no optim for {name}: pass your own optimizer to it")
    options = {
        key: value for key, value in pen.value("optimizer.options", {}).items() if key not in ("fused", "foreach")
    }
    if options:
        pen.lossy("optimizer.options", f"no field for {', '.join(options)}: pass your own optimizer")
    else:
        pen.implied("optimizer.options")


# -- schedule ------------------------------------------------------------------------------------------------------


def _schedule(pen: Pen) -> None:
    name, final = pen.value("schedule.name"), pen.value("schedule.final_fraction", 0.0)
    paths = ("schedule.name", "schedule.final_fraction")
    kind, options = "lr_scheduler_type", "lr_scheduler_kwargs"
    if name == "constant":
        warm = pen.value("schedule.warmup_steps") or pen.value("schedule.warmup_fraction")
        pen.put(paths, kind, "constant_with_warmup" if warm else "constant")
    elif name in ("linear", "cosine") and not final:
        pen.put(paths, kind, name)
    elif name == "cosine":
        pen.put(paths, kind, "cosine_with_min_lr")
        pen.write(options, {"min_lr_rate": final})
    elif name == "linear":
        pen.put(paths, kind, "polynomial")
        pen.write(options, {"power": 1.0, "lr_end": pen.value("optimizer.lr", FIELDS["learning_rate"].default) * final})
    elif name == "wsd":
        _stable(pen, final)
    elif name in OWN_SCHEDULES:
        pen.put("schedule.name", kind, name)
    elif name is not None:
        pen.lossy("schedule.name", f"the Trainer has no schedule {name}: it decays linearly", kind)


def _stable(pen: Pen, final: float) -> None:
    total, decay = pen.value("schedule.total_steps"), pen.value("schedule.decay_steps")
    if decay is None and total is None:
        pen.lossy(
            "schedule.name", "the length of the decay is not known: set schedule.decay_steps", "lr_scheduler_type"
        )
        return
    kind = pen.value("schedule.options", {}).get("decay_type", "linear")
    said = {"num_decay_steps": decay or max(1, total // 5), "decay_type": kind, "min_lr_ratio": final}
    pen.put(("schedule.name", "schedule.final_fraction"), "lr_scheduler_type", "warmup_stable_decay")
    pen.put(("schedule.decay_steps", "schedule.options"), "lr_scheduler_kwargs", said)


# -- the rest ------------------------------------------------------------------------------------------------------


def _saving(pen: Pen) -> None:
    if not pen.is_set("saving.every"):
        return
    every = pen.value("saving.every")
    if every is None:
        pen.put("saving.every", "save_strategy", "no", "the Trainer saves every 500 steps unless it is told not to")
    else:
        _field(pen, "saving.every", "save_steps")
    if pen.value("saving.background"):
        pen.lossy("saving.background", "the Trainer waits until a checkpoint is written")


def _switches(pen: Pen) -> None:
    _field(pen, "training.compile", "torch_compile")
    if pen.value("training.device") == "cpu":
        pen.put("training.device", "use_cpu", True)
    else:
        pen.implied("training.device")
