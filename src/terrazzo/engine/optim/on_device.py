"""Updates on the device: by the optimizer's own step, which is given gradients, and of what that is to leave alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.summed import SummedGradient
from terrazzo.engine.optim.kept import KeptStates
from terrazzo.engine.optim.matrix_steps import MatrixSteps
from terrazzo.engine.optim.narrow_steps import NarrowStates
from terrazzo.engine.optim.segment import Segment
from terrazzo.engine.optim.stepper import Stepper
from terrazzo.engine.plan.precision import Precision

__all__ = ["DeviceUpdates"]


class DeviceUpdates:
    """Those of one optimizer.

    Args:
        first: number of its first param group among those of all the model's optimizers.
        matrices: steps those that it needs whole.
    """

    def __init__(self, precision: Precision, first: int, matrices: MatrixSteps) -> None:
        self._first, self._matrices = first, matrices
        self._moments_differ = precision.moments != precision.master

    def are_apart(self, segment: Segment) -> bool:
        """Whether the optimizer's own step is to leave it alone."""
        return self._moments_differ or segment.bucket.updated_off_device or self._matrices.has(segment)

    def begin(self, optimizer: Optimizer, segments: Sequence[Segment]) -> None:
        """Step what is apart, and give gradients to the others: the optimizer's own step is still to come."""
        on_device = [segment for segment in segments if not segment.bucket.updated_off_device]
        finished = _handed_over([segment for segment in on_device if segment.due])
        self._matrices.step(optimizer, on_device, lambda segment: _give_gradient(segment, finished))
        on_device = [segment for segment in on_device if not self._matrices.has(segment)]
        if self._moments_differ:
            self._step_one_by_one(optimizer, on_device, finished)
        else:
            for segment in on_device:
                _give_gradient(segment, finished)

    def _step_one_by_one(
        self, optimizer: Optimizer, segments: Sequence[Segment], finished: Mapping[Bucket, SummedGradient]
    ) -> None:
        """Moments live in their own dtype: bring one segment's to the master's, step it alone, put them back."""
        stepper = Stepper(optimizer, self._first)
        for segment in segments:
            if segment.due or stepper.is_own:
                segment.adopt(stepper.state.get(segment.parameter) or {})
                _give_gradient(segment, finished)
                kept = KeptStates(segment) if segment.bucket.precision.narrow is None else NarrowStates(segment)
                kept.step(stepper, segment.parameter)
                segment.parameter.grad = None


def _handed_over(due: Sequence[Segment]) -> dict[Bucket, SummedGradient]:
    """The finished gradients of these segments."""
    buckets = {segment.bucket: None for segment in due}
    return {b: b.gradient.handed_over([each.range for each in due if each.bucket is b]) for b in buckets}


def _give_gradient(segment: Segment, finished: Mapping[Bucket, SummedGradient]) -> None:
    if segment.due:
        segment.parameter.grad = segment.gradient(finished[segment.bucket])
