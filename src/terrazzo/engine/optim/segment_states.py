"""The states of one segment: loaded for a step of that segment alone, and stored behind it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from terrazzo.engine.optim.segment import Segment
from terrazzo.engine.optim.stepper import Stepper

__all__ = ["SegmentStates"]


class SegmentStates:
    """What an optimizer keeps for a segment.

    States per element rest in the dtype of moments, and a step has them in that of its parameter. Others it has as they
    are. Here they rest in `optimizer.state`; a subclass says where else.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def step(self, stepper: Stepper, parameter: nn.Parameter) -> None:
        """Update `parameter`, the segment's values, and what is kept; of that, nothing where the step raises."""
        segment = self.segment
        state = stepper.state.get(segment.parameter) or {}
        before = {key: self.load(key, value, parameter) for key, value in state.items()}
        if after := stepper.step(segment.group, parameter, before):
            stepper.state[segment.parameter] = {key: self.store(key, value) for key, value in after.items()}

    def load(self, key: str, value: Any, parameter: Tensor) -> Any:
        """What a step of `parameter` gets for `value`, which `optimizer.state` has under `key`."""
        return value.to(parameter.dtype) if self.segment.keeps_per_element(key, value) else value

    def store(self, key: str, value: Any) -> Any:
        """What `optimizer.state` has from now on for `value`, as a step has left it."""
        per_element = self.segment.keeps_per_element(key, value)
        return value.to(self.segment.bucket.precision.shown_moments) if per_element else value
