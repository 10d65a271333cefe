"""The states of one segment in a dtype: loaded for a step of that segment alone, and stored behind it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from terrazzo.engine.optim.segment import Segment
from terrazzo.engine.optim.state_memory import StateMemory
from terrazzo.engine.optim.stepper import Stepper

__all__ = ["FullStates"]


class FullStates:
    """What an optimizer keeps for a segment, whose step takes all of it at once.

    States per element rest in the dtype of moments, and a step has them in that of its parameter: in `optimizer.state`,
    or where the bucket has them. Others `optimizer.state` has as they are.

    Args:
        memory: where states of the bucket are.
    """

    def __init__(self, segment: Segment, memory: StateMemory) -> None:
        self.segment, self._memory = segment, memory

    def step(self, stepper: Stepper, parameter: nn.Parameter) -> None:
        """Update `parameter`, the segment's values, and what is kept; of that, nothing where the step raises."""
        segment = self.segment
        state = stepper.state.get(segment.parameter) or {}
        before = {key: self.load(key, value, parameter) for key, value in state.items()}
        if after := stepper.step(segment.group, parameter, before):
            stepper.state[segment.parameter] = {key: self.store(key, value) for key, value in after.items()}

    def load(self, key: str, value: Any, parameter: Tensor) -> Any:
        """What a step of `parameter` gets for `value`, which `optimizer.state` has under `key`."""
        if key in self._memory:
            return self._memory.part(key, self.segment.range).to(parameter.dtype)
        return value.to(parameter.dtype) if self._is_own(key, value) else value

    def store(self, key: str, value: Any) -> Any:
        """What `optimizer.state` has from now on for `value`, as a step has left it."""
        segment = self.segment
        if key not in self._memory:
            return value.to(segment.bucket.precision.shown_moments) if self._is_own(key, value) else value
        at_rest = self._memory.part(key, segment.range)
        if at_rest.data_ptr() != value.data_ptr():
            at_rest.copy_(value)
        self._memory.keep(key)
        placeholder = segment.state_placeholder(key)
        return at_rest if placeholder is None else placeholder

    def _is_own(self, key: str, value: Any) -> bool:
        """Whether `optimizer.state` itself has it, in the dtype of moments; others stay as a step has left them."""
        return not self.segment.bucket.moments_apart and self.segment.keeps_per_element(key, value)
