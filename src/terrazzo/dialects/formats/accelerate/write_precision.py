"""Writing dtypes, which Accelerate's YAML has no keys for: a verdict on each, by what the stack makes of it."""

from __future__ import annotations

from terrazzo.dialects.core.description import LOADED
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.shared.accelerate_stack import AUTOCAST, stays_as_loaded

__all__ = ["write_autocast", "write_precision"]


def write_precision(draft: Draft, brought: dict[str, str], why: str) -> None:
    """A verdict for every dtype that the stack brings along, and `why` another one is lost."""
    for state, kind in brought.items():
        path = f"precision.{state}"
        wanted = draft.value(path)
        if wanted is None or wanted == kind:
            draft.implied(path, key="mixed_precision" if draft.has("mixed_precision") else "")
        elif kind == LOADED:
            draft.lossy(path, stays_as_loaded(wanted))
        else:
            draft.lossy(path, f"it is {kind} there: {why}")


def write_autocast(draft: Draft, half: str | None) -> None:
    """Accelerate runs the forward under autocast, sharded or not, but for DeepSpeed."""
    if half and draft.value("precision.autocast") is not True:
        draft.lossy("precision.autocast", AUTOCAST, "mixed_precision")
    elif half:
        draft.implied("precision.autocast", key="mixed_precision")
    elif draft.value("precision.autocast"):
        draft.lossy("precision.autocast", "without mixed_precision there is none")
