"""Writing DeepSpeed's JSON: what DeepSpeed does by itself needs no key, and the same dialect gets its own keys back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.key_verdict import VerdictKind
from terrazzo.dialects.formats.deepspeed.auto import AUTO
from terrazzo.dialects.formats.deepspeed.keys import TABLE
from terrazzo.dialects.formats.deepspeed.versions import LAST, default_of

__all__ = ["DeepSpeedDraft"]


class DeepSpeedDraft(Draft):
    """A draft of a DeepSpeed document.

    Attributes:
        originals: what stood at a key where its neutral setting says it in other words.
        context: for whom.
        version: of DeepSpeed, as numbers.
    """

    def __init__(self, description: Description, context: ReadingContext) -> None:
        super().__init__(description, "DeepSpeed", "deepspeed")
        self.context, self.version = context, context.version("deepspeed", LAST)
        self.originals = {extra.key: extra.value for extra in description.extras} if self.own else {}

    def default(self, key: str) -> Any:
        """DeepSpeed's default in the target's version."""
        return default_of(key, self.version, TABLE[key].default)

    def came_from(self, paths: str | Iterable[str], key: str) -> bool:
        """Whether this very dialect said these settings by this key."""
        names = [paths] if isinstance(paths, str) else paths
        return self.own and any(key in self.setting(path).keys for path in names)

    def put_if_needed(
        self, paths: str | Sequence[str], key: str, value: Any, note: tuple[VerdictKind, str] = ("applied", "")
    ) -> None:
        """Write one key for some settings, unless DeepSpeed does so by itself and the key did not stand there.

        Args:
            paths: the settings that it says.
            key: DeepSpeed's.
            value: in DeepSpeed's words.
            note: the verdict and its reason.
        """
        names = [paths] if isinstance(paths, str) else paths
        if any(self.setting(path).origin == "auto" for path in names) and self.came_from(names, key):
            self.put(names, key, AUTO, "Hugging Face fills it: DeepSpeed alone does not take 'auto'")
        elif key in self.originals and not self.came_from(names, key):
            self._mark(names, note[0], key, note[1])  # `finish` restores it
        elif value != self.default(key) or self.came_from(names, key):
            self.put(
                names, key, self.originals.get(key, value) if self.came_from(names, key) else value, note[1], note[0]
            )
        else:
            self._mark(names, note[0], "", note[1])
