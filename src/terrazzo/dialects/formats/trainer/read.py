"""Reading TrainingArguments: the Trainer's own fields, and a DeepSpeed document within."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Setting, SettingsByKey
from terrazzo.dialects.core.dialect import NO_CONTEXT, ConfigDocument, Reading, ReadingContext
from terrazzo.dialects.formats.shared.accelerate import stack_precision
from terrazzo.dialects.formats.trainer.findings import MATCHED
from terrazzo.dialects.formats.trainer.keys import EIGHT_BITS, KEYS, REMOVED
from terrazzo.dialects.formats.trainer.read_loop import read_loop
from terrazzo.dialects.formats.trainer.read_parallel import read_parallel, stack_of
from terrazzo.dialects.formats.trainer.reader import TrainerReader

__all__ = ["read"]

_OUTER = (
    *("batch.", "optimizer.", "schedule.", "training.compile", "training.seed", "training.device"),
    *("saving.every", "saving.keep_last", "saving.folder", "activation_checkpointing."),
)
"""Settings that the Trainer's own fields decide where the DeepSpeed document says nothing."""


def read(document: ConfigDocument, context: ReadingContext = NO_CONTEXT) -> Reading:
    """The document's meaning."""
    source = TrainerReader(document, context)
    source.keep_nulls()
    stack = stack_of(source)
    given = {**read_loop(source), **read_parallel(source, stack)}
    given |= _precision(source, stack, given)
    if source.nested is not None:
        given = _with_deepspeed(given, source.nested.given)
        given = {path: _with_field(source, setting) for path, setting in given.items()}
        _clipping(source, given["training.clip"].value)
    _narrow(source, given)
    _explain_others(source)
    return source.close(given)


def _precision(source: TrainerReader, stack: str, given: Mapping[str, Setting[Any]]) -> SettingsByKey:
    halves = [source.take(name) for name in ("bf16", "fp16")]
    if all(half.value for half in halves):
        source.refuse("fp16", "TrainingArguments raise when both bf16 and fp16 are on: keep one")
    half: Setting[Any] = Setting(None, *_which(halves))
    for name, switch in zip(("bf16", "fp16"), halves, strict=True):
        if switch.value:
            half = Setting(name, switch.origin, switch.key)
            break
    if stack == "native":
        mixed = source.take("distributed_config.fsdp_mixed_precision")
        half = Setting("bf16" if mixed.value else None, mixed.origin, mixed.key)
    if stack == "deepspeed":
        return {}
    deferred = given["batch.accumulation"].value > 1
    return stack_precision(stack, half, deferred, source.context)


def _narrow(source: TrainerReader, given: SettingsByKey) -> None:
    """An optimizer whose states are in 8 bits is another one here, and the precision of moments says the rest."""
    if str(source.get("optim")) in EIGHT_BITS and "optim" in given["optimizer.name"].keys:  # DeepSpeed may have its own
        given["precision.moments"] = Setting("int8", "file", "optim")
        source.say("optim", "lossy", "codes of 8 bits have other values here, and small tensors have them too")


def _which(halves: list[Setting[Any]]) -> tuple[Any, str]:
    said = [half for half in halves if half.origin == "file"]
    return ("file", ", ".join(half.key for half in said)) if said else ("default", "")


def _with_deepspeed(outer: Mapping[str, Setting[Any]], inner: Mapping[str, Setting[Any]]) -> SettingsByKey:
    """DeepSpeed's settings, and the Trainer's where DeepSpeed's document leaves them open."""
    given = dict(inner)
    for path, setting in outer.items():
        if not path.startswith(_OUTER):
            continue
        within = inner.get(path)
        if within is None or within.value is None or not within.keys or within.origin == "default":
            given[path] = setting
        elif within.origin == "auto" and within.value == setting.value:
            keys = ", ".join(dict.fromkeys((*setting.keys, *within.keys)))
            given[path] = Setting(setting.value, "file" if setting.origin == "file" else "auto", keys)
    return given


def _with_field(source: TrainerReader, setting: Setting[Any]) -> Setting[Any]:
    """The setting under the field as well that a key of the DeepSpeed document must agree with."""
    fields = (MATCHED.get(key.removeprefix("deepspeed."), "") for key in setting.keys if key.startswith("deepspeed."))
    found = [field for field in fields if field in source.flat]
    return replace(setting, key=", ".join(dict.fromkeys((*found, *setting.keys)))) if found else setting


def _clipping(source: TrainerReader, does: float | None) -> None:
    """Under DeepSpeed the engine clips, by its own key: the Trainer's only fills "auto"."""
    if source.nested is None or "gradient_clipping" in source.nested.document or "max_grad_norm" not in source.flat:
        return
    said = source.get("max_grad_norm")
    source.keep("max_grad_norm", "DeepSpeed's gradient_clipping decides", loss="harmless")
    if said != (does or 0):
        why = f"DeepSpeed clips at its own gradient_clipping, {does or 0:g}: say deepspeed: {{gradient_clipping: auto}}"
        source.refuse("max_grad_norm", why)


def _explain_others(source: TrainerReader) -> None:
    """Fields that nobody looks at: those that are gone, those of a DistributedConfig, and the Trainer's own."""
    for key in source.unread():
        top = key.partition(".")[0]
        if top in REMOVED:
            source.refuse(key, f"transformers 5 has no such argument and raises a TypeError: {REMOVED[top]}")
        elif top == "distributed_config" and key in KEYS:
            source.keep(key, "only the Trainer has it")
        else:
            source.keep_row(key)
