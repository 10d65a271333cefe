"""A warm-up in steps, and what it means that rates lag behind."""

from __future__ import annotations

import math

from terrazzo.dialects.core.agreement import has_no_effect
from terrazzo.dialects.core.draft import Draft
from terrazzo.messages import counted

__all__ = ["warmup_steps", "write_lags"]


def warmup_steps(share: float, total: int) -> int:
    """A share of the run in steps, as transformers' `get_warmup_steps` counts it: rounded up."""
    return math.ceil(total * share)


def write_lags(draft: Draft, warmup: int | None, decay: int | None) -> None:
    """Say where a step's rate is another's: of which steps of warm-up, and of the last one.

    Args:
        warmup, decay: the lags of the target's own schedules; None: it has nothing of the kind.
    """
    here, there = ("here", "there") if draft.library == "Terrazzo" else ("there", "here")
    for name, lag, words in (("warmup", warmup, _first), ("decay", decay, _last)):
        path = f"schedule.{name}_lag"
        asked = draft.value(path, 0)
        if lag is None or not draft.is_set(path):
            continue
        if asked == lag or has_no_effect(draft.description, path):
            draft.implied(path)
        else:
            draft.lossy(path, f"{words(draft, lag)} {here}, and {there} {words(draft, asked)}")


def _first(draft: Draft, lag: int) -> str:
    if lag:
        return f"the rate is zero for {counted(lag, 'step')}"
    steps, total = draft.value("schedule.warmup_steps"), draft.value("schedule.total_steps")
    if not steps and total:
        steps = warmup_steps(draft.value("schedule.warmup_fraction", 0.0), total)
    return f"the first step has {f'1/{min(steps, total or steps)} of the peak' if steps else 'a part of the peak'}"


def _last(draft: Draft, lag: int) -> str:
    behind = f"{counted(lag, 'step')} behind the last" if lag else "that of the last step"
    return f"the lowest rate is {behind}"
