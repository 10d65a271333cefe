"""What the driver of an optimizer asks of updates away from the device, which `offload` makes; here none are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.gradients.summed import SummedGradient
from terrazzo.engine.optim.segments.segment import Segment
from terrazzo.engine.optim.segments.state_memory import StateMemory

__all__ = ["Half", "OffDeviceUpdates", "SegmentWork", "Uses"]

Half = Literal["weights", "states"]
"""What of a model may hold half a step: its weights, or what the optimizer keeps."""


class Uses(NamedTuple):
    """States of segments that some work uses: master weights, and weights that follow; moments, and the gradient."""

    weights: bool = True
    moments: bool = True


class SegmentWork(Protocol):
    """Work that the thread of updates does to segments away from the device, one after the other."""

    @property
    def uses(self) -> Uses: ...

    def run(self, segment: Segment, memory: StateMemory, values: Tensor | None, gradient: Tensor | None) -> None:
        """Do it to one.

        Args:
            memory: where states of its bucket are.
            values: the master weights, to be changed in place; None where `uses` leaves them out.
            gradient: in their dtype; None where there is none, or `uses` leaves it out.
        """


class OffDeviceUpdates:
    """Updates of one model's units, however and when they are made; here none, since no state is off the device.

    Attributes:
        steps_in_backward: whether units are updated while backward runs.
    """

    steps_in_backward = False

    def unit_reduced(self, index: int, optimizer: Optimizer) -> None:
        """The gradients of a unit are finished."""

    def before_forward(self, index: int) -> None:
        """A forward of a unit begins.

        Raises:
            Misuse: where the unit has been updated for a step that is still to come, or was given up.
        """

    def before_step(self, optimizer: Optimizer) -> None:
        """`optimizer.step()` comes: refuse what cannot be, and wait for updates of an earlier step."""

    def carry_out(
        self,
        work: SegmentWork,
        segments: Sequence[Segment],
        optimizer: Optimizer,
        finished: Mapping[Bucket, SummedGradient],
    ) -> None:
        """Do `work` to some segments with gradients, all away from the device, and return once it is done."""

    def begin(self, finished: Mapping[Bucket, SummedGradient]) -> None:
        """Start the updates of the step that has been prepared, but those under way and those of whole matrices.

        Args:
            finished: the gradients of buckets.
        """

    def after_step(self) -> None:
        """`optimizer.step()` returns."""

    def forget(self, abandoned: bool = False) -> None:
        """Gradients are forgotten; `abandoned`: the step is given up, and units may have been updated already."""

    def require_step_taken(self, what: str, reads: Half | None = None) -> None:
        """Refuse `what`, which sees or changes weights or states, where some have been updated and others not.

        Args:
            reads: what it reads; refused after a step that was given up, too, until that has been restored.

        Raises:
            Misuse: there.
        """

    def restored(self, what: Half) -> None:
        """All weights of the model have been restored, or all states of the optimizer."""

    def catch_up(self) -> None:
        """Wait for every update, and bring all weights at rest in line."""

    def await_states(self) -> None:
        """Wait until no update writes what the optimizer keeps. Not collective."""

    def await_scaling(self) -> None:
        """Wait until no update scales what it was handed."""

    def prepare_clipping(self, max_norm: float) -> None:
        """No update reads or scales gradients from now on; a `max_norm` of infinity only measures them.

        Raises:
            Misuse: where they have been used already.
        """
