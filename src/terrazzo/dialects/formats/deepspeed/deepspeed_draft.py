"""Writing DeepSpeed's JSON: what DeepSpeed does by itself needs no key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.key_verdict import VerdictKind
from terrazzo.dialects.formats.deepspeed.keys import TABLE
from terrazzo.dialects.formats.deepspeed.versions import LAST, MOVED, default_of

__all__ = ["DeepSpeedDraft"]


class DeepSpeedDraft(Draft):
    """A draft of a DeepSpeed document.

    Attributes:
        context: for whom.
        version: of DeepSpeed, as numbers.
    """

    def __init__(self, description: Description, context: ReadingContext) -> None:
        super().__init__(description, "DeepSpeed", TABLE)
        self.context, self.version = context, context.version("deepspeed", LAST)

    def default(self, key: str) -> Any:
        """DeepSpeed's default in the target's version."""
        return default_of(key, self.version, TABLE[key].default)

    def put_if_needed(
        self, paths: str | Sequence[str], key: str, value: Any, note: tuple[VerdictKind, str] = ("applied", "")
    ) -> None:
        """Write one key for some settings, unless every release of DeepSpeed does so by itself.

        Args:
            paths: the settings that it says.
            key: DeepSpeed's.
            value: in DeepSpeed's words.
            note: the verdict and its reason.
        """
        kind, why = note
        if key in MOVED or value != self.default(key):
            self.put(paths, key, value, why, kind)
        else:
            self._mark(paths, kind, "", why)
