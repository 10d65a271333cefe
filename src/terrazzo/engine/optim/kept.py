"""What an optimizer keeps for one segment, lent to a step of that segment alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from terrazzo.engine.optim.segment import Segment
from terrazzo.engine.optim.stepper import Stepper

__all__ = ["KeptStates"]


class KeptStates:
    """States per element rest in the dtype of moments: a step has them in that of its parameter. Others it has as is.

    Here they rest where the optimizer has them; a subclass says where else.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def step(self, stepper: Stepper, parameter: nn.Parameter) -> None:
        """Update `parameter`, the segment's values, and what is kept; of that, nothing where the step raises."""
        segment = self.segment
        kept = stepper.state.get(segment.parameter) or {}
        lent = {key: self.lent(key, value, parameter) for key, value in kept.items()}
        if after := stepper.step(segment.group, parameter, lent):
            stepper.state[segment.parameter] = {key: self.put_back(key, value) for key, value in after.items()}

    def lent(self, key: str, value: Any, parameter: nn.Parameter) -> Any:
        """What a step is given of `value`, which the optimizer has under `key`."""
        return value.to(parameter.dtype) if self.segment.keeps_per_element(key, value) else value

    def put_back(self, key: str, value: Any) -> Any:
        """What the optimizer has from now on of `value`, as a step has left it."""
        per_element = self.segment.keeps_per_element(key, value)
        return value.to(self.segment.bucket.precision.shown_moments) if per_element else value
