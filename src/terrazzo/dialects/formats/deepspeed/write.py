"""Writing DeepSpeed's JSON from the neutral description."""

from __future__ import annotations

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.formats.deepspeed.deepspeed_draft import DeepSpeedDraft
from terrazzo.dialects.formats.deepspeed.write_precision import write_precision
from terrazzo.dialects.formats.deepspeed.write_training import (
    write_batch,
    write_optimizer,
    write_schedule,
    write_training,
)
from terrazzo.dialects.formats.deepspeed.write_zero import (
    write_mesh,
    write_offload,
    write_prefetch,
    write_saving,
    write_sharding,
)

__all__ = ["write"]


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """A document that DeepSpeed's loader takes, with a verdict for every setting."""
    draft = DeepSpeedDraft(description, context)
    write_batch(draft)
    stage = write_sharding(draft)
    write_mesh(draft, stage)
    write_offload(draft, stage)
    write_prefetch(draft, stage)
    on_cpu = str(draft.value("offload.optim", "device")).startswith(("cpu", "nvme"))
    write_precision(draft, stage, on_cpu)
    write_optimizer(draft)
    write_schedule(draft)
    write_training(draft)
    write_saving(draft, stage)
    return draft.finish()
