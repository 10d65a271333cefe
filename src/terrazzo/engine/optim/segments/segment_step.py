"""A step of one segment alone, with an optimizer's own code: its states are loaded for that, and stored after it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.buckets.resting.coded import CodedState
from terrazzo.engine.formats.bf16_remainder import join_remainder, split_remainder
from terrazzo.engine.formats.block_format import tile_numel
from terrazzo.engine.formats.stochastic_rounding import round_stochastically
from terrazzo.engine.optim.segments.segment import Segment
from terrazzo.engine.optim.segments.state_memory import StateMemory
from terrazzo.engine.optim.stock.settings import snapshot
from terrazzo.engine.optim.stock.stepper import Stepper
from terrazzo.engine.plan.layout import Range

__all__ = ["SegmentStates", "step_segment"]


def step_segment(stepper: Stepper, segment: Segment, parameter: nn.Parameter, memory: StateMemory) -> None:
    """Update `parameter`, the values of a segment, by its `.grad`, and what the optimizer keeps for it; of that,
    nothing where the step raises, unless it is in 8 bits.

    Args:
        memory: where states of the segment's bucket are.
    """
    narrow = segment.bucket.spec.precision.narrow is not None
    (_NarrowStates if narrow else SegmentStates)(segment, memory).step(stepper, parameter)


class SegmentStates:
    """States that an optimizer keeps for a segment, whose step takes all of each at once.

    States per element rest in the dtype of moments, and a step has them in that of its parameter: in `optimizer.state`,
    or where the bucket has them. Others `optimizer.state` has as they are.

    Args:
        memory: where states of the bucket are.
    """

    def __init__(self, segment: Segment, memory: StateMemory) -> None:
        self.segment, self._memory = segment, memory

    def step(self, stepper: Stepper, parameter: nn.Parameter) -> None:
        """Do what `step_segment` says."""
        segment = self.segment
        state = stepper.state.get(segment.parameter) or {}
        before = {key: self.load(key, value, parameter) for key, value in state.items()}
        if after := stepper.step(segment.group, parameter, before):
            stepper.state[segment.parameter] = {key: self.store(key, value) for key, value in after.items()}

    def load(self, key: str, value: Any, parameter: Tensor) -> Any:
        """The value that a step of `parameter` gets for `value`, which `optimizer.state` has under `key`."""
        if key in self._memory:
            return self._memory.part(key, self.segment.range).to(parameter.dtype)
        return value.to(parameter.dtype) if self._is_own(key, value) else value

    def store(self, key: str, value: Any) -> Any:
        """The value that `optimizer.state` has from now on for `value`, as a step has left it."""
        segment = self.segment
        if key not in self._memory:
            return value.to(segment.bucket.spec.precision.shown_moments) if self._is_own(key, value) else value
        at_rest = self._memory.part(key, segment.range)
        if at_rest.data_ptr() != value.data_ptr():
            at_rest.copy_(value)
        placeholder = self._kept(key)
        return at_rest if placeholder is None else placeholder

    def _kept(self, key: str) -> Any:
        """The stand-in for a state of the bucket that a step has written, if `optimizer.state` has not that itself."""
        self._memory.keep(key)
        return self.segment.state_placeholder(key)

    def _is_own(self, key: str, value: Any) -> bool:
        """Whether `optimizer.state` itself has it, in the dtype of moments; others stay as a step has left them."""
        return not self.segment.bucket.spec.moments_apart and self.segment.keeps_per_element(key, value)


class _NarrowStates(SegmentStates):
    """States in 8 bits, which a step takes a few blocks at a time, so that never all are in fp32."""

    def step(self, stepper: Stepper, parameter: nn.Parameter) -> None:
        segment = self.segment
        coded = {key: state for key, state in segment.bucket.moments.items() if isinstance(state, CodedState)}
        known = stepper.state.get(segment.parameter) or {}
        others = {key: value for key, value in known.items() if key not in coded}
        after: dict[str, Any] = {}
        unforeseen: dict[str, list[Tensor]] = defaultdict(list)  # such as a momentum that was 0 at first: in fp32
        values, gradient = parameter.detach(), parameter.grad
        for tile in segment.range.pieces(tile_numel(values.device.type)):
            within = tile.within(segment.range)
            part = nn.Parameter(self._loaded(values[within], tile))
            if gradient is not None:
                part.grad = gradient[within].float()
            own = {k: v[within] if segment.keeps_per_element(k, v) else v for k, v in others.items()}
            decoded = {k: coded[k].blocks.decode(self._memory.part(k, tile)) for k in coded if k in known}
            after = stepper.step(segment.group, part, {**snapshot(own), **decoded})
            part.grad = None  # a copy, perhaps, which need not stay while states are encoded
            if part.data_ptr() != values[within].data_ptr():
                self._round(part.detach(), values, tile, after)
            for key, value in after.items():
                if key in coded:
                    coded[key].blocks.encode(value, self._memory.part(key, tile))
                elif segment.template.keeps_per_element(key, value, part.shape):
                    unforeseen[key].append(value)
        if after:
            joined = {**after, **{key: torch.cat(parts) for key, parts in unforeseen.items()}}
            stepper.state[segment.parameter] = {
                key: self._kept(key) if key in coded else value for key, value in joined.items()
            }

    def _loaded(self, values: Tensor, tile: Range) -> Tensor:
        """The segment's `values` in a `tile`, in fp32."""
        has_remainder = self.segment.bucket.spec.has_remainder
        return join_remainder(values, self._memory.remainder(tile)) if has_remainder else values.float()

    def _round(self, stepped: Tensor, values: Tensor, tile: Range, after: Mapping[str, Any]) -> None:
        """Replace the `tile` of the segment's values by those in fp32 that a step has made of it."""
        segment = self.segment
        if segment.bucket.spec.has_remainder:
            nearest, remainder = split_remainder(stepped)
            values[tile.within(segment.range)] = nearest
            self._memory.remainder(tile).copy_(remainder)
        elif segment.bucket.spec.precision.stochastic:
            self._round_stochastically(stepped, values, tile, after["step"])
        else:
            values[tile.within(segment.range)] = stepped

    def _round_stochastically(self, stepped: Tensor, values: Tensor, tile: Range, number: Tensor) -> None:
        """`_round`, by the `number` of the step."""
        segment = self.segment
        size = -(-tile.numel // 8)  # numbers of elements and bits take 36 bytes for each
        for (slot, elements_of_slot), piece in itertools.product(segment.slots(), tile.pieces(size)):
            if (part := elements_of_slot.intersect(piece)).numel:
                own = slot.own(part)
                new, elements = stepped[part.within(tile)], segment.bucket.box(slot).elements(own, stepped.device)
                values[part.within(segment.range)] = round_stochastically(new, slot.name, elements, number)
