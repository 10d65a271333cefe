"""The DeepSpeed document of TrainingArguments, as Accelerate's plugin hands it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.dialect import ConfigDocument, ReadingContext
from terrazzo.dialects.formats.nested import DEEPSPEED, Nested, read_nested

__all__ = ["completed", "read_completed"]


def completed(document: ConfigDocument, fields: Mapping[str, Any]) -> tuple[ConfigDocument, str]:
    """A DeepSpeed document as it is handed on, and the section that it got: Accelerate's plugin switches on, where the
    document has no such section, the type of 16 bits that TrainingArguments ask for.
    """
    low = next((name for name in ("fp16", "bf16") if fields.get(name) is True), "")
    if not low or low in document:
        return document, ""
    return {**document, low: {"enabled": True}}, low


def read_completed(document: ConfigDocument, context: ReadingContext, file: Any = None) -> Nested:
    """The DeepSpeed document, read as it is handed on; what a field has added to it is said by that field alone."""
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
