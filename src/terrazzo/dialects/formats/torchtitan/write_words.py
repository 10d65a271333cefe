"""What the parts of torchtitan's writer share."""

from __future__ import annotations

from typing import Any

from terrazzo.dialects.core.draft import TerseDraft
from terrazzo.dialects.formats.torchtitan.keys import KEYS

__all__ = ["ACTIVATIONS", "CLASSES", "DECAY_TYPE", "GLOBAL_BATCH", "OPTIMIZER", "final_fraction", "option"]

ACTIVATIONS, DECAY_TYPE = "activation_checkpoint", "lr_scheduler.decay_type"
GLOBAL_BATCH = "training.global_batch_size"
OPTIMIZER = tuple(f"optimizer.{name}" for name in ("name", "lr", "betas", "eps", "weight_decay", "options"))
"""Settings that are one key, `optimizer.param_groups`."""
CLASSES = {"none": None, "full": "FullAC", "selective_half": "SelectiveAC"}
"""The class that recomputes what a mode recomputes."""


def option(draft: TerseDraft, path: str, key: str, words: dict[Any, Any] | None = None) -> None:
    """Write a setting unless it is the key's default; the words are those of neutral values."""
    draft.option(path, key, KEYS[key].default if words is None else KEYS[key].neutral, words)


def final_fraction(draft: TerseDraft) -> None:
    """Write the share of the peak that is left at the last step."""
    if draft.value("schedule.final_fraction") is not None:
        option(draft, "schedule.final_fraction", "lr_scheduler.min_lr_factor")
