"""The DeepSpeed document of TrainingArguments, as Accelerate's plugin hands it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Extra
from terrazzo.dialects.core.dialect import ConfigDocument, ReadingContext
from terrazzo.dialects.core.key_verdict import KeyVerdict, VerdictKind
from terrazzo.dialects.core.keys import MISSING, integer
from terrazzo.dialects.formats.nested import DEEPSPEED, Nested, merge, read_nested
from terrazzo.documents.dotted_keys import keys_in

__all__ = ["completed", "read_completed"]

_SEQUENCE = "sequence_parallel_size"
_UNUSED = "the Trainer splits sequences by parallelism_config alone: say sp_size and dp_shard_size there"


def completed(document: ConfigDocument, fields: Mapping[str, Any]) -> tuple[ConfigDocument, str]:
    """A DeepSpeed document as it is handed on, and the section that it got: Accelerate's plugin switches on, where the
    document has no such section, the type of 16 bits that TrainingArguments ask for.
    """
    low = next((name for name in ("fp16", "bf16") if fields.get(name) is True), "")
    if not low or low in document:
        return document, ""
    return {**document, low: {"enabled": True}}, low


def read_completed(document: ConfigDocument, context: ReadingContext, sequence: int, file: Any = None) -> Nested:
    """The DeepSpeed document, read as it is handed on; what a field has added to it is said by that field alone.

    Args:
        sequence: the ranks that share sequences, by the field that says so: the document's own key does nothing.
    """
    value = document.get(_SEQUENCE)
    told = 1 if value is None else integer(1).parse(value)
    if told is MISSING:  # which is refused
        return _read_switched(document, context, file)
    own = {key: each for key, each in document.items() if key != _SEQUENCE}
    nested = _read_switched(own | ({_SEQUENCE: sequence} if sequence > 1 else {}), context, file)
    return _with_own(nested, document, told, file)


def _with_own(nested: Nested, document: ConfigDocument, told: int, file: Any) -> Nested:
    """The reading with the document's own key for the ranks that share sequences, which says `told`."""
    key = f"deepspeed.{_SEQUENCE}"
    settings = {path: setting for path, setting in nested.settings.items() if path != "mesh.sp"}
    others = [verdict for verdict in nested.verdicts if verdict.key != key]
    verdicts = [replace(each, target=_without_axis(each.target)) for each in others]
    extras = list(nested.extras)
    if _SEQUENCE in document:
        value, lost = document[_SEQUENCE], told > 1
        kind: VerdictKind = "lossy" if lost else "applied"
        why = _UNUSED if lost else ""
        own = KeyVerdict(key, value, kind, "", why)
        verdicts = merge([*verdicts, own if file is None else replace(own, key="deepspeed", value=file)])
        extras.append(Extra(key, value, why, "lossy" if lost else "harmless", usual=not lost))
    return replace(nested, settings=settings, verdicts=tuple(verdicts), extras=tuple(extras), document=document)


def _without_axis(target: str) -> str:
    return ", ".join(path for path in keys_in(target) if path != "mesh.sp")


def _read_switched(document: ConfigDocument, context: ReadingContext, file: Any) -> Nested:
    whole, field = completed(document, context.trainer)
    nested = read_nested(DEEPSPEED, whole, context, "deepspeed", file=file)
    if not field:
        return nested
    inner, added = nested.inner.description, f"deepspeed.{field}"
    settings = dict(nested.settings)
    for path in [path for path in settings if f"{field}.enabled" in inner[path].keys]:
        others = [key for key in settings[path].keys if file is None and not key.startswith(f"{added}.")]
        settings[path] = replace(settings[path], key=", ".join((field, *others)))
    verdicts = tuple(verdict for verdict in nested.verdicts if not verdict.key.startswith(f"{added}."))
    extras = tuple(extra for extra in nested.extras if not extra.key.startswith(f"{added}."))
    return replace(nested, settings=settings, verdicts=verdicts, extras=extras)
