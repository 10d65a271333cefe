"""A document on its way in: today's, or one of before 0.3, whose keys are found under their names of today."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from terrazzo.dialects.core.dialect import ConfigDocument, ReadingContext
from terrazzo.dialects.core.key_verdict import VerdictKind
from terrazzo.dialects.core.reader import Reader
from terrazzo.dialects.formats.torchtitan.keys import KEYS, OPAQUE
from terrazzo.dialects.formats.torchtitan.keys_earlier import EARLIER, today
from terrazzo.documents.dotted_keys import put, without

__all__ = ["ROWS", "TorchtitanReader", "is_earlier"]

_FIRST = (0, 3, 0)
"""The first version of today's keys."""
_SUMS_TOKENS = (0, 2, 2)
"""The first version whose loss is a sum over tokens, divided by all of a step."""
ROWS = {**KEYS, **EARLIER}


def _version(context: ReadingContext) -> tuple[int, ...]:
    return context.version("torchtitan", "0.3.0")


def is_earlier(keys: Iterable[str], context: ReadingContext) -> bool:
    """Whether a document with these keys is one of before 0.3: by the version that is told, or a key that is gone."""
    return _version(context) < _FIRST or any(key in EARLIER or today(key) != key for key in keys)


class TorchtitanReader(Reader):
    """A reader that knows the names of earlier versions.

    Attributes:
        context: what the document does not say.
        earlier: the document is one of before 0.3, by the context's version or a key that there is no more.
        mean: what the loss is the mean over; None: of which version the document is, is not known.
        said_together: keys of today with values, each of which several keys of before 0.3 say.
    """

    def __init__(self, document: ConfigDocument, context: ReadingContext) -> None:
        super().__init__(document, "torchtitan", OPAQUE, ROWS, today, older=True)
        self.context = context
        self.earlier = is_earlier(self.flat, context)
        told = "torchtitan" in context.versions or not self.earlier
        self.mean = ("tokens" if _version(context) >= _SUMS_TOKENS else "micro_batches") if told else None
        self.said_together: dict[str, Any] = {}

    def keep_gone(self) -> None:
        """Keep what there is no more as its row says."""
        for key in [key for key in self.unread() if key in EARLIER]:
            self.keep_row(key)
            if self.extras and self.extras[-1].key == key:
                kind: VerdictKind = "defaulted" if self.extras[-1].loss == "harmless" else "lossy"
                self.mark(key, kind, f"gone from torchtitan 0.3 on; {self.extras[-1].why}")

    def _without_refused(self) -> dict[str, Any]:
        """The document as torchtitan 0.3 takes it."""
        kept = without(super()._without_refused(), EARLIER)
        for key, value in self.said_together.items():
            put(kept, key, value)
        return kept
