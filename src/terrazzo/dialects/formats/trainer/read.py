"""Reading TrainingArguments: the Trainer's own fields, and a DeepSpeed document within."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import LOADED, Setting, SettingsByPath
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.core.keys import BOOLEAN
from terrazzo.dialects.core.reader import derived
from terrazzo.dialects.formats.shared.accelerate_dtypes import stack_precision
from terrazzo.dialects.formats.shared.fsdp_policy import load_dtype
from terrazzo.dialects.formats.trainer.keys import AT_ONCE, EIGHT_BITS, MATCHED
from terrazzo.dialects.formats.trainer.read_loop import read_loop
from terrazzo.dialects.formats.trainer.read_parallel import read_parallel, stack_of
from terrazzo.dialects.formats.trainer.trainer_reader import TrainerReader

__all__ = ["read"]

_OUTER = (
    *("batch.", "optimizer.", "schedule.", "training.compile", "training.seed", "training.device"),
    *("training.loss_mean", "mesh."),
    *("saving.when", "saving.every", "saving.keep_last", "saving.folder", "activation_checkpointing."),
)
"""Settings that the Trainer's own fields decide where the DeepSpeed document says nothing."""


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """The document's meaning."""
    reader = TrainerReader(document, context)
    reader.keep_nulls()
    stack = stack_of(reader)
    settings = {**read_loop(reader), **read_parallel(reader, stack)}
    settings |= _precision(reader, stack, settings)
    if reader.nested is not None:
        settings = _with_deepspeed(settings, reader.nested.settings)
        settings = {path: _with_field(reader, setting) for path, setting in settings.items()}
        _clipping(reader, settings["training.clip"].value)
    _narrow(reader, settings)
    reader.keep_gone()
    return reader.close(settings)


def _precision(reader: TrainerReader, stack: str, settings: Mapping[str, Setting[Any]]) -> SettingsByPath:
    halves = [reader.take(name) for name in ("bf16", "fp16")]
    if all(half.value for half in halves):
        reader.refuse("fp16", "TrainingArguments raise when both bf16 and fp16 are on: keep one")
    half: Setting[Any] = Setting(None, *_which(halves))
    for name, switch in zip(("bf16", "fp16"), halves, strict=True):
        if switch.value:
            half = Setting(name, switch.origin, switch.key)
            break
    if stack == "deepspeed":
        return {}
    at_once = reader.take_as(AT_ONCE, BOOLEAN, False) if stack in ("fsdp1", "fsdp2") else Setting(False, "default")
    deferred = settings["batch.accumulation"].value > 1 and not at_once.value
    gathered = _gathered(reader, half, settings) if stack == "native" else Setting(None, "default")
    dtypes = stack_precision(stack, half, deferred, reader.context, gathered)
    if at_once.origin == "file":
        dtypes["precision.accumulate"] = derived(dtypes["precision.accumulate"].value, at_once, origin="file")
    return dtypes


def _gathered(reader: TrainerReader, half: Setting[Any], settings: Mapping[str, Setting[Any]]) -> Setting[Any]:
    """What transformers' own sharding gathers weights in; autocast may compute in another dtype."""
    mixed = reader.take("distributed_config.fsdp_mixed_precision")
    does = "bf16" if mixed.value else load_dtype(reader.context, False)
    if half.value not in (None, does) and settings["sharding.weight"].value != "-":
        why = f"weights are gathered {'as loaded' if does == LOADED else f'in {does}'}, and autocast computes in"
        reader.mark(half.key, "lossy", f"{why} {half.value}")
    return Setting("bf16" if mixed.value else None, mixed.origin, mixed.key)


def _narrow(reader: TrainerReader, settings: SettingsByPath) -> None:
    """An optimizer whose states are in 8 bits is another one here, and the precision of moments says the rest."""
    if (
        str(reader.raw("optim")) in EIGHT_BITS and "optim" in settings["optimizer.name"].keys
    ):  # DeepSpeed may have its own
        settings["precision.moments"] = Setting("int8", "file", "optim")
        reader.mark("optim", "lossy", "codes of 8 bits have other values here, and small tensors have them too")


def _which(halves: list[Setting[Any]]) -> tuple[Any, str]:
    from_file = [half for half in halves if half.origin == "file"]
    return ("file", ", ".join(half.key for half in from_file)) if from_file else ("default", "")


def _with_deepspeed(outer: Mapping[str, Setting[Any]], inner: Mapping[str, Setting[Any]]) -> SettingsByPath:
    """DeepSpeed's settings, and the Trainer's where DeepSpeed's document leaves them open."""
    settings = dict(inner)
    for path, setting in outer.items():
        if not path.startswith(_OUTER) or (path.startswith("schedule.") and not _steps_by(path, inner)):
            continue
        if path.startswith("mesh.") and setting.origin == "default" and path in inner:
            continue
        within = inner.get(path)
        if within is None or within.value is None or not within.keys or within.origin == "default":
            settings[path] = setting
        elif within.origin == "auto" and within.value == setting.value:
            keys = ", ".join(dict.fromkeys((*setting.keys, *within.keys)))
            settings[path] = Setting(setting.value, "file" if setting.origin == "file" else "auto", keys)
    return settings


def _steps_by(path: str, inner: Mapping[str, Setting[Any]]) -> bool:
    """Whether the Trainer's fields say this of the schedule: all of it where DeepSpeed's document has none.

    Beside one they say the length of the run, and the warm-up that "auto" leaves open.
    """
    if "schedule.name" not in inner:
        return True
    warmup = inner.get("schedule.warmup_steps")
    is_open = warmup is not None and warmup.origin == "auto" and warmup.value is None
    return path == "schedule.total_steps" or (is_open and path.startswith("schedule.warmup_"))


def _with_field(reader: TrainerReader, setting: Setting[Any]) -> Setting[Any]:
    """The setting under the field as well that a key of the DeepSpeed document must agree with."""
    fields = (MATCHED.get(key.removeprefix("deepspeed."), "") for key in setting.keys if key.startswith("deepspeed."))
    present = [field for field in fields if field and field in reader]
    return replace(setting, key=", ".join(dict.fromkeys((*present, *setting.keys)))) if present else setting


def _clipping(reader: TrainerReader, does: float | None) -> None:
    """Under DeepSpeed the engine clips, by its own key: the Trainer's only fills "auto"."""
    if reader.nested is None or "gradient_clipping" in reader.nested.document or "max_grad_norm" not in reader.flat:
        return
    norm = reader.take("max_grad_norm")
    if norm.origin != "file":  # null, or no number, which is refused
        return
    reader.keep("max_grad_norm", "DeepSpeed's gradient_clipping decides", loss="harmless")
    if norm.value != (does or 0):
        why = f"DeepSpeed clips at its own gradient_clipping, {does or 0:g}: say deepspeed: {{gradient_clipping: auto}}"
        reader.refuse("max_grad_norm", why)
