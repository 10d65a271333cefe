"""What an update of whole matrices does where their states rest away from the device: all but what needs them whole.

Momentum and master weights stay there, and are changed by the thread of updates. To the device go what owners are sent,
and from it comes back what they have made of it, both in the dtype that matrices are exchanged in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from terrazzo.engine.optim.matrices.matrix_exchange import MatrixBuffers
from terrazzo.engine.optim.matrices.matrix_owners import MatrixPart
from terrazzo.engine.optim.segments.off_device_updates import Uses
from terrazzo.engine.optim.segments.segment import Segment
from terrazzo.engine.optim.segments.segment_step import SegmentStates
from terrazzo.engine.optim.segments.state_memory import StateMemory
from terrazzo.engine.optim.stock.settings import snapshot
from terrazzo.optim import MatrixOptimizer

__all__ = ["ApplyOffDevice", "PrepareOffDevice"]

_HOST_NUMEL = 1 << 20
"""Elements that are prepared or changed at once in host memory, which then need little beside their states."""


@dataclass
class PrepareOffDevice:
    """Changes the states of segments away from the device, and brings to it what owners are sent of their matrices."""

    optimizer: MatrixOptimizer
    groups: Mapping[int, dict[str, object]]
    sent: Mapping[Segment, Sequence[MatrixPart]]
    buffers: MatrixBuffers
    uses: ClassVar = Uses(weights=False)

    def run(self, segment: Segment, memory: StateMemory, values: Tensor | None, gradient: Tensor | None) -> None:
        assert gradient is not None
        states = SegmentStates(segment, memory)  # matrices have none in 8 bits
        kept = self.optimizer.state.get(segment.parameter) or {}
        before = {key: states.load(key, value, gradient) for key, value in kept.items()}
        after, fresh = dict[str, Any](), dict[str, list[Tensor]]()
        for tile in segment.range.pieces(_HOST_NUMEL):
            within = tile.within(segment.range)
            own = {k: v[within] if segment.keeps_per_element(k, v) else snapshot(v) for k, v in before.items()}
            update = self.optimizer.prepare(self.groups[segment.group], own, gradient[within])
            for key, value in own.items():
                if not segment.template.keeps_per_element(key, value, update.shape):
                    after[key] = value
                elif key in before:
                    after[key] = before[key]  # changed in place
                else:
                    fresh.setdefault(key, []).append(value)
            for part in self.sent[segment]:
                if (common := part.range.intersect(tile)).numel:
                    self.buffers.of(MatrixPart(part.matrix, common)).copy_(update[common.within(tile)])
        after |= {key: torch.cat(parts) for key, parts in fresh.items()}
        self.optimizer.state[segment.parameter] = {key: states.store(key, value) for key, value in after.items()}


@dataclass
class ApplyOffDevice:
    """Changes master weights away from the device by the updates of matrices, which are on it."""

    optimizer: MatrixOptimizer
    groups: Mapping[int, dict[str, object]]
    parts: Mapping[Segment, Sequence[MatrixPart]]
    buffers: MatrixBuffers
    uses: ClassVar = Uses(moments=False)

    def run(self, segment: Segment, memory: StateMemory, values: Tensor | None, gradient: Tensor | None) -> None:
        assert values is not None
        for matrix, held in self.parts[segment]:
            for tile in held.pieces(_HOST_NUMEL):
                update = self.buffers.of(MatrixPart(matrix, tile)).to(values.device)
                self.optimizer.apply(
                    self.groups[segment.group], values[tile.within(segment.range)], update, matrix.shape
                )
