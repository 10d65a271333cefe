"""Writing a torchtitan configuration that was read from one: the keys that stood there, and no others."""

from __future__ import annotations

from terrazzo.dialects.core.draft import TerseDraft
from terrazzo.dialects.formats.torchtitan.write_words import (
    ACTIVATIONS,
    CLASSES,
    DECAY_TYPE,
    GLOBAL_BATCH,
    final_fraction,
    option,
)

__all__ = ["own_activations", "own_batch", "own_saving", "own_schedule"]


def own_batch(draft: TerseDraft) -> None:
    """The global batch; -1 where that stood there for one micro-batch of each rank."""
    count = draft.setting("batch.accumulation")
    if GLOBAL_BATCH in count.keys and count.origin == "file":
        draft.put("batch.accumulation", GLOBAL_BATCH, -1)
    else:
        option(draft, "batch.global_batch", GLOBAL_BATCH)


def own_schedule(draft: TerseDraft) -> None:
    """The type of the decay, where it is the schedule's name; and what is left at its end."""
    name = draft.setting("schedule.name")
    if DECAY_TYPE in name.keys and name.origin == "file":
        draft.put("schedule.name", DECAY_TYPE, name.value)
    final_fraction(draft)


def own_activations(draft: TerseDraft) -> None:
    """The class. MemoryBudgetAC, whose mode is that of none, is kept as it stands."""
    path = "activation_checkpointing.mode"
    keys = draft.setting(path).keys
    if keys in ((ACTIVATIONS,), (f"{ACTIVATIONS}.type",)) and not draft.is_extra(keys[0]):
        draft.put(path, keys[0], CLASSES[draft.value(path)])


def own_saving(draft: TerseDraft) -> None:
    """Whether checkpoints are written, and how often, by whichever of the two keys stood there."""
    every, keys = draft.value("saving.every"), draft.setting("saving.every").keys
    if "checkpoint.enable" in keys:
        draft.put("saving.every", "checkpoint.enable", every is not None)
    if "checkpoint.interval" in keys:
        draft.write("checkpoint.interval", every)
    draft.implied("saving.every", key="checkpoint.interval")
