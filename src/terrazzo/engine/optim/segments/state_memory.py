"""Where a step of one segment finds states that are its bucket's."""

from __future__ import annotations

from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import Buffer
from terrazzo.engine.buckets.resting.coded import CodedState
from terrazzo.engine.buckets.resting.with_remainder import WithRemainder
from terrazzo.engine.optim.segments.segment import Segment
from terrazzo.engine.plan.layout import Range

__all__ = ["StateMemory"]


class StateMemory:
    """The states of a segment's bucket where they rest, in memory. A subclass says where else."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def __contains__(self, key: str) -> bool:
        """Whether a state is the bucket's, and not the optimizer's own."""
        return key in self.segment.bucket.moments

    def part(self, key: str, elements: Range) -> Tensor:
        """The `elements` of one state, a view to be changed; of one in 8 bits, the bytes of these blocks."""
        state = self.segment.bucket.moments[key]
        if isinstance(state, CodedState):
            elements, state = elements.as_bytes(state.blocks), state.codes
        assert isinstance(state, Buffer), "what is on nvme has to be staged"
        return state.part(elements)

    def remainder(self, elements: Range) -> Tensor:
        """The remainder of `elements` of its master weights, int16, a view to be changed."""
        exact = self.segment.bucket.exact
        assert isinstance(exact, WithRemainder), "`BucketSpec.has_remainder` says so"
        assert isinstance(exact.remainder, Buffer), "what is on nvme has to be staged"
        return exact.remainder.part(elements)

    def keep(self, key: str) -> None:
        """A step has written the segment's part of a state."""
