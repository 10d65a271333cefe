"""The section `batch`: sizes in sequences and tokens."""

from __future__ import annotations

from pydantic import Field

from terrazzo.config.section import Section

__all__ = ["BatchConfig"]


class BatchConfig(Section):
    """Sizes in sequences and tokens. The number of micro-batches per step follows from these and the rank count."""

    global_batch: int = Field(32, gt=0, description="sequences per optimizer step, over all ranks")
    micro_batch: int = Field(4, gt=0, description="sequences per forward pass on one rank")
    sequence_length: int = Field(256, gt=1, description="tokens per sequence")
