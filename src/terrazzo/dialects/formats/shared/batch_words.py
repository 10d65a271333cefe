"""Sizes of a batch that a library works out from the others and the number of data ranks."""

from __future__ import annotations

from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.mesh import data_ranks

__all__ = ["ACCUMULATION_FOLLOWS", "GLOBAL_BATCH_FOLLOWS", "size_follows"]

ACCUMULATION_FOLLOWS = "global batch / (micro-batch × data ranks)"
GLOBAL_BATCH_FOLLOWS = "micro-batch × accumulation × data ranks"


def size_follows(draft: Draft, path: str, how: str, key: str = "") -> None:
    """Say of a size that it follows from the others: as the document says, where the number of ranks is known."""
    verdict = draft.holds if data_ranks(draft.description) is None else draft.implied
    verdict(path, how, key)
