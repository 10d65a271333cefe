"""Buffers of a rank's modules as they were before a step, put back where it fails.

A rank that fails sends zeros for what others wait for, and these compute with them until all meet: a norm's running
statistics would keep that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from terrazzo.engine import Stages
from terrazzo.engine.instrumentation.traffic import Ledger

__all__ = ["buffers_kept"]


@contextmanager
def buffers_kept(model: nn.Module, stages: Stages, ledger: Ledger) -> Iterator[None]:
    """Copies of the buffers that this rank's stages, and what is in no stage, have now.

    Where the body raises, modules have all of them again: the same tensors, with what they held.

    Args:
        ledger: where the bytes of the copies are counted.
    """
    buffers = stages.buffers_here(model)
    values = {buffer: buffer.detach().clone() for _, each in buffers for buffer in each.values() if buffer is not None}
    with ledger.holding(sum(before.nbytes for before in values.values())):
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for module, each in buffers:
                    module._buffers.clear()
                    module._buffers.update(each)
                for buffer, before in values.items():
                    buffer.copy_(before)
            raise
