"""Updates on the device: before the optimizer's own step, and in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.gradients.summed import SummedGradient
from terrazzo.engine.optim.matrices.matrix_steps import MatrixSteps
from terrazzo.engine.optim.segments.segment import Segment
from terrazzo.engine.optim.segments.segment_step import step_segment
from terrazzo.engine.optim.segments.state_memory import StateMemory
from terrazzo.engine.optim.stock.stepper import Stepper
from terrazzo.engine.plan.precision import Precision

__all__ = ["DeviceUpdates"]


class DeviceUpdates:
    """Updates of one optimizer on the device. A segment there is updated in one of three ways:

        matrices that the optimizer needs whole     before, by `MatrixSteps`, which does so away from the device too
        moments in another dtype than masters       here, one after the other, by a `Stepper`
        any other                                   by the optimizer's own step, which finds its gradient

    Args:
        first: number of its first param group among those of all the model's optimizers.

    Attributes:
        matrices: steps those that it needs whole.
    """

    def __init__(self, precision: Precision, first: int, matrices: MatrixSteps) -> None:
        self._first, self.matrices = first, matrices
        self._moments_differ = precision.moments != precision.master

    def excludes(self, segment: Segment) -> bool:
        """Whether the optimizer's own step is to leave it alone."""
        return self._moments_differ or segment.bucket.spec.updated_off_device or self.matrices.has(segment)

    def begin(
        self, optimizer: Optimizer, segments: Sequence[Segment], finished: Mapping[Bucket, SummedGradient]
    ) -> None:
        """Step what is excluded, and give the others their gradients: the optimizer's own step is still to come.

        Args:
            finished: the gradients of buckets.
        """
        here = [segment for segment in segments if not segment.bucket.spec.updated_off_device]
        on_device = [segment for segment in here if not self.matrices.has(segment)]
        if self._moments_differ:
            self._step_one_by_one(optimizer, on_device, finished)
        else:
            for segment in on_device:
                segment.take_gradient(finished)

    def _step_one_by_one(
        self, optimizer: Optimizer, segments: Sequence[Segment], finished: Mapping[Bucket, SummedGradient]
    ) -> None:
        """Load one segment's moments in the master's dtype, step it alone, and store them in their own."""
        stepper = Stepper(optimizer, self._first)
        for segment in segments:
            if segment.due or stepper.is_own:
                segment.take_over_states(stepper.state.get(segment.parameter) or {})
                segment.take_gradient(finished)
                step_segment(stepper, segment, segment.parameter, StateMemory(segment))
                segment.parameter.grad = None
