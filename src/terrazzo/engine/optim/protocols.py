"""What the driver of an optimizer asks of what comes later in the engine: the model, and updates off the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.consensus.progress import Progress
from terrazzo.engine.schedule.schedule import Schedule

__all__ = ["Driven", "OffDeviceUpdates"]


class Driven(Protocol):
    """A model whose weights an optimizer steps: its `Engine`."""

    units: Sequence[Unit]
    progress: Progress
    schedule: Schedule

    def prepare_step(self) -> None:
        """Gradients are about to be taken, and master weights to be changed."""

    def publish(self, among: Collection[Bucket] | None = None) -> None:
        """Bring compute weights of some buckets in line with updated master weights."""


class OffDeviceUpdates:
    """Updates of one model's units, however and when they are made; here none, since no state is off the device.

    Attributes:
        steps_in_backward: whether units are updated while backward runs.
    """

    steps_in_backward = False

    def unit_reduced(self, index: int, optimizer: Optimizer) -> None:
        """The gradients of a unit are finished."""

    def begin(self, optimizer: Optimizer) -> None:
        """`optimizer.step()`: start the updates that are not under way."""

    def end_step(self) -> None:
        """`optimizer.step()` returns."""

    def forget(self, abandoned: bool = False) -> None:
        """Gradients are forgotten; `abandoned`: the step is given up, and units may have been updated already."""

    def begin_restoring(self) -> None:
        """All states are about to be restored."""

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
