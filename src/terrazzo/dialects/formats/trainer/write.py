"""Writing TrainingArguments from a description.

Rows that FSDP runs are written as `fsdp_config`; what only DeepSpeed has, such as stage 1 or NVMe, as a DeepSpeed
document inside, with "auto" wherever a field of TrainingArguments says the same.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.core.mesh import SAME_DATA_AXES, ranks_left
from terrazzo.dialects.formats.nested import DEEPSPEED, joined
from terrazzo.dialects.formats.shared.fsdp_arguments import wants_deepspeed
from terrazzo.dialects.formats.shared.launcher import leave_to_launcher
from terrazzo.dialects.formats.shared.plan_rows import is_split
from terrazzo.dialects.formats.trainer.keys import KEYS, MATCHED
from terrazzo.dialects.formats.trainer.write_loop import write_loop, write_schedule
from terrazzo.dialects.formats.trainer.write_parallel import write_ddp, write_fsdp, write_precision

__all__ = ["write"]

_AXES = "parallelism_config"
_LENGTHS = ("schedule.total_steps", "schedule.warmup_steps", "schedule.warmup_fraction")
"""Settings of the schedule that have fields of their own, whoever makes it."""


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """The document."""
    draft = Draft(description, "TrainingArguments", KEYS)
    write_loop(draft)
    leave_to_launcher(draft)
    if wants_deepspeed(description):
        return _with_deepspeed(draft, context)
    write_schedule(draft)
    if not is_split(description):
        write_ddp(draft, context)
        write_precision(draft, "ddp", context)
    else:
        write_fsdp(draft, context)
        write_precision(draft, "fsdp2", context)
    return draft.finish()


# -- DeepSpeed inside ----------------------------------------------------------------------------------------------


def _with_deepspeed(draft: Draft, context: ReadingContext) -> Writing:
    inner = DEEPSPEED.written(draft.description, context)
    _switches(draft, inner.document)
    own = ["batch.global_batch"]
    stepped = "scheduler" in inner.document and _steps_better(draft.description, inner)
    if not stepped:
        write_schedule(draft)
        own.append("schedule.")
    section = _automatic(deepcopy(inner.document), draft.document)
    if section.pop("sequence_parallel_size", None) is not None:
        _write_sequence(draft, context)
    if not stepped:
        section.pop("scheduler", None)
    writing = joined(draft, inner, "deepspeed", own)
    return replace(writing, document={**writing.document, "deepspeed": section})


def _write_sequence(draft: Draft, context: ReadingContext) -> None:
    """Ulysses as Accelerate registers it: the sizes of both axes make up all ranks."""
    shards = ranks_left(draft.description, context.world, SAME_DATA_AXES)
    why = "" if shards is not None else "dp_shard_size has to be the ranks that are left: add it, or say --world"
    draft.put("mesh.sp", f"{_AXES}.sp_size", draft.value("mesh.sp"), why, "lossy" if why else "applied")
    draft.write(f"{_AXES}.sp_backend", "deepspeed")
    if shards is not None:
        draft.write(f"{_AXES}.dp_shard_size", shards)


def _steps_better(description: Description, inner: Writing) -> bool:
    """Whether DeepSpeed's scheduler, which the Trainer obeys where there is one, keeps more than the Trainer's own."""
    own = Draft(description, "TrainingArguments", KEYS)
    write_schedule(own)
    losses = [
        sum(
            each.kind != "applied" for each in verdicts if each.key.startswith("schedule.") and each.key not in _LENGTHS
        )
        for verdicts in (inner.verdicts, own.finish().verdicts)
    ]
    return losses[0] < losses[1]


def _switches(draft: Draft, document: dict[str, Any]) -> None:
    """The Trainer's own switches for 16 bits, which must agree with DeepSpeed's."""
    for name in ("bf16", "fp16"):
        section = document.get(name)
        if isinstance(section, dict) and section.get("enabled") is True:
            draft.write(name, True)


def _automatic(inner: dict[str, Any], outer: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed document with "auto" for what a field outside says: differing values would be refused."""
    for key, field in MATCHED.items():
        *parents, last = key.split(".")
        place: Any = inner
        for parent in parents:
            place = place.get(parent) if isinstance(place, dict) else None
        if isinstance(place, dict) and last in place and (field in outer or last != "enabled"):
            place[last] = "auto"
    always = ("gradient_clipping", "train_micro_batch_size_per_gpu")
    inner |= dict.fromkeys((*always, *(["train_batch_size"] if "train_batch_size" in inner else [])), "auto")
    return inner
