"""Writing Lightning's configuration from a description, as LightningCLI reads it."""

from __future__ import annotations

from terrazzo.dialects.core.description import Description
from terrazzo.dialects.core.dialect import NO_CONTEXT, ReadingContext, Writing
from terrazzo.dialects.core.draft import Draft
from terrazzo.dialects.formats.lightning.keys import KEYS
from terrazzo.dialects.formats.lightning.write_deepspeed import write_deepspeed
from terrazzo.dialects.formats.lightning.write_loop import write_loop, write_optimizer, write_schedule
from terrazzo.dialects.formats.lightning.write_strategy import write_ddp, write_fsdp
from terrazzo.dialects.formats.shared.fsdp_arguments import wants_deepspeed
from terrazzo.dialects.formats.shared.launcher import write_ranks
from terrazzo.dialects.formats.shared.plan_rows import is_split

__all__ = ["write"]

_STAGES = ("terrazzo", "deepspeed")
"""Dialects whose zero3 may as well be DeepSpeed's stage 3, which clips by norm where FSDPStrategy raises."""


def write(description: Description, context: ReadingContext = NO_CONTEXT) -> Writing:
    """The document."""
    draft = Draft(description, "Lightning", KEYS)
    write_ranks(draft, "trainer.devices", "trainer.num_nodes")
    write_loop(draft)
    clipped = draft.value("training.clip") is not None and description.dialect in _STAGES
    if wants_deepspeed(description) or (description.row == "zero3" and clipped):
        return write_deepspeed(draft, context)
    write_optimizer(draft)
    write_schedule(draft)
    if is_split(description):
        write_fsdp(draft, context)
    else:
        write_ddp(draft, context)
    if draft.value("mesh.tp", 1) != 1:
        draft.lossy("mesh.tp", "ModelParallelStrategy alone has it, and configure_model() says what is split")
    return draft.finish()
