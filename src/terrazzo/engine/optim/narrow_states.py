"""The states of one segment in 8 bits: loaded for steps of a few blocks at a time, so that never all are in fp32."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.buckets.resting.narrow import NarrowState
from terrazzo.engine.formats.stochastic_rounding import round_stochastically
from terrazzo.engine.optim.segment import Segment
from terrazzo.engine.optim.settings import frozen
from terrazzo.engine.optim.state_memory import StateMemory
from terrazzo.engine.optim.stepper import Stepper
from terrazzo.engine.plan.layout import Range, tiles

__all__ = ["NarrowStates"]


class NarrowStates:
    """The states of one segment; those that are not per element the optimizer has as they are.

    Args:
        memory: where states of the bucket are.
    """

    def __init__(self, segment: Segment, memory: StateMemory) -> None:
        self.segment, self._memory = segment, memory

    def step(self, stepper: Stepper, parameter: nn.Parameter) -> None:
        """Update `parameter`, the segment's values, and what is kept, in fp32 and tile by tile."""
        segment = self.segment
        states = {key: state for key, state in segment.bucket.moments.items() if isinstance(state, NarrowState)}
        known = stepper.state.get(segment.parameter) or {}
        others = {key: value for key, value in known.items() if key not in states}
        after: dict[str, Any] = {}
        unforeseen: dict[str, list[Tensor]] = defaultdict(list)  # such as a momentum that was 0 at first: in fp32
        values, gradient = parameter.detach(), parameter.grad
        for tile in tiles(segment.range, values.device.type):
            within = tile.within(segment.range)
            part = nn.Parameter(values[within].float())
            if gradient is not None:
                part.grad = gradient[within].float()
            own = {k: v[within] if segment.keeps_per_element(k, v) else v for k, v in others.items()}
            decoded = {
                key: state.decoded(self._memory.part(key, tile)) for key, state in states.items() if key in known
            }
            after = stepper.step(segment.group, part, {**frozen(own), **decoded})
            part.grad = None  # a copy, perhaps, which need not stay while states are encoded
            if part.data_ptr() != values[within].data_ptr():
                self._round(part.detach(), values, tile, after)
            for key, value in after.items():
                if key in states:
                    states[key].encode(value, self._memory.part(key, tile))
                elif segment.template.keeps_per_element(key, value, part.shape):
                    unforeseen[key].append(value)
        if after:
            joined = {**after, **{key: torch.cat(parts) for key, parts in unforeseen.items()}}
            stepper.state[segment.parameter] = {
                key: self._stored(key) if key in states else value for key, value in joined.items()
            }

    def _round(self, stepped: Tensor, values: Tensor, tile: Range, after: Mapping[str, Any]) -> None:
        """Replace the `tile` of the segment's values by those in fp32 that a step has made of it."""
        segment = self.segment
        if not segment.bucket.precision.stochastic:
            values[tile.within(segment.range)] = stepped
            return
        size = -(-tile.numel // 8)  # numbers of elements and bits take 36 bytes for each
        pieces = [Range(start, min(start + size, tile.stop)) for start in range(tile.start, tile.stop, size)]
        for (slot, elements_of_slot), piece in itertools.product(segment.slots(), pieces):
            if (part := elements_of_slot.intersect(piece)).numel:
                own = slot.own(part)
                new, elements = stepped[part.within(tile)], segment.bucket.box(slot).elements(own, stepped.device)
                values[part.within(segment.range)] = round_stochastically(new, slot.name, elements, after["step"])

    def _stored(self, key: str) -> Any:
        """What `optimizer.state` has from now on in place of a state whose codes are written."""
        self._memory.keep(key)
        return self.segment.state_placeholder(key)
