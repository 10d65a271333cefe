"""A step of one segment alone, with an optimizer's own code."""

from __future__ import annotations

from torch import nn

from terrazzo.engine.optim.full_states import FullStates
from terrazzo.engine.optim.narrow_states import NarrowStates
from terrazzo.engine.optim.segment import Segment
from terrazzo.engine.optim.state_memory import StateMemory
from terrazzo.engine.optim.stepper import Stepper

__all__ = ["step_segment"]


def step_segment(stepper: Stepper, segment: Segment, parameter: nn.Parameter, memory: StateMemory) -> None:
    """Update `parameter`, the values of a segment, by its `.grad`, and what the optimizer keeps for it.

    Args:
        memory: where states of the segment's bucket are.
    """
    if segment.bucket.precision.narrow is None:
        FullStates(segment, memory).step(stepper, parameter)
    else:
        NarrowStates(segment, memory).step(stepper, parameter)
