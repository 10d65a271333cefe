"""Writing DeepSpeed's JSON from the neutral description."""

from __future__ import annotations

from terrazzo.dialects.deepspeed.pen import NAME, Pen
from terrazzo.dialects.deepspeed.write_precision import write_precision
from terrazzo.dialects.deepspeed.write_training import write_batch, write_optimizer, write_schedule, write_training
from terrazzo.dialects.deepspeed.write_zero import (
    write_mesh,
    write_offload,
    write_prefetch,
    write_saving,
    write_sharding,
)
from terrazzo.dialects.description import Description
from terrazzo.dialects.dialect import Context, Writing

__all__ = ["write"]


def write(description: Description, context: Context) -> Writing:
    """A document that DeepSpeed's loader takes, with a verdict for every setting."""
    pen = Pen(description, context)
    write_batch(pen)
    stage = write_sharding(pen)
    write_mesh(pen, stage)
    write_offload(pen, stage)
    write_prefetch(pen, stage)
    on_cpu = str(pen.value("offload.optim", "device")).startswith(("cpu", "nvme"))
    write_precision(pen, stage, on_cpu)
    write_optimizer(pen)
    write_schedule(pen)
    write_training(pen)
    write_saving(pen, stage)
    return pen.finish(NAME)
