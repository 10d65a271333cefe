"""Buffers of a rank's modules as they were before a step, put back where it fails.

A rank that fails sends zeros for what others wait for, and these compute with them until all meet: a norm's running
statistics would keep that.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from terrazzo.parallel.pipeline.line import Line

__all__ = ["BuffersBefore"]


class BuffersBefore:
    """Copies of the buffers that this rank's stages, and what is in no stage, have now."""

    def __init__(self, model: nn.Module, line: Line) -> None:
        self._held = [(module, dict(module._buffers)) for module in _with_buffers(model, line)]
        each = [buffer for _, held in self._held for buffer in held.values() if buffer is not None]
        self._values: dict[Tensor, Tensor] = {buffer: buffer.detach().clone() for buffer in each}

    @torch.no_grad()
    def put_back(self) -> None:
        """Have all of them again: the same tensors, with what they held."""
        for module, held in self._held:
            module._buffers.clear()
            module._buffers.update(held)
        for buffer, values in self._values.items():
            buffer.copy_(values)


def _with_buffers(model: nn.Module, line: Line) -> Iterator[nn.Module]:
    """All modules that have some, but those of the line that other ranks run. Few: names are looked at for these."""
    for name, module in model.named_modules():
        if module._buffers and (not line.has(name) or line.runs(name)):
            yield module
