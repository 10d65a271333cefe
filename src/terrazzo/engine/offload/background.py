"""When states away from the device are updated: behind the next forward, behind backward, or on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.offload.options import StepMode
from terrazzo.engine.offload.update import Updater
from terrazzo.engine.optim.protocols import OffDeviceUpdates
from terrazzo.engine.optim.segment import Segment
from terrazzo.engine.optim.stepper import Stepper
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.errors import Misuse

__all__ = ["BackgroundUpdates"]


class BackgroundUpdates(OffDeviceUpdates):
    """Starts the updates of one model's units, and waits for them.

    Args:
        first: number of the optimizer's first param group among those of all the model's optimizers.
        segments: gives those that the optimizer steps now.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: Schedule,
        updater: Updater,
        mode: StepMode,
        first: int,
        segments: Callable[[], Iterable[Segment] | None],
    ) -> None:
        self.units, self.schedule, self.mode, self.steps_in_backward = units, schedule, mode, mode == "backward"
        self._updater, self._first, self._segments = updater, first, segments
        self._off_device = [unit for unit in units if any(bucket.updated_off_device for bucket in unit.buckets)]
        self._early: Stepper | None = None
        self._begun: set[int] = set()
        self._torn = False

    def unit_reduced(self, index: int, optimizer: Optimizer) -> None:
        """The gradients of a unit are finished: update it at once, where that may be, and every parameter has one."""
        unit = self.units[index]
        self._check_whole()
        if index in self._begun:
            raise Misuse(
                f"Gradients of {unit.title} came after its update had begun: with offload step "
                "'backward' a step has one backward of each unit outside 'with tz.accumulate(model)', and "
                "optimizer.step() follows it. Or use tz.Offload(step='overlapped')."
            )
        if self.steps_in_backward and unit in self._off_device and all(all(b.gradient.seen) for b in unit.trainable()):
            if self._early is None:
                self._early = Stepper(optimizer, self._first)
            self._begun.add(index)
            unit.weights.catch_up()
            self._begin(unit, self._early)

    def begin(self, optimizer: Optimizer) -> None:
        """`optimizer.step()`: start the updates that are not under way, in the order of forward."""
        self._check_whole()
        early, begun = self._early, set(self._begun)
        changed = early.changed_since(optimizer) if early is not None else ()
        self.forget(abandoned=bool(changed))
        if changed:
            raise Misuse(
                f"The optimizer's {', '.join(changed)} changed between backward and optimizer.step(), but with "
                "offload step 'backward' units are updated while backward runs. Change hyper-parameters after "
                "optimizer.step(), or use tz.Offload(step='overlapped')."
            )
        stepper = early or Stepper(optimizer, self._first)
        order = dict.fromkeys([*self.schedule.order.forward, *range(len(self.units))])
        for unit in (self.units[index] for index in order if index not in begun):
            if unit in self._off_device:
                unit.weights.catch_up()
                self._begin(unit, stepper)

    def end_step(self) -> None:
        """`optimizer.step()` returns."""
        if self.mode == "synchronous":
            self.catch_up()

    def forget(self, abandoned: bool = False) -> None:
        """Gradients are forgotten.

        Args:
            abandoned: whether the step is given up: units that have been updated already are ahead of the others, or
                all have been stepped though nobody asked for it.
        """
        self._torn = self._torn or (abandoned and bool(self._begun))
        self._early = None
        self._begun.clear()

    def begin_restoring(self) -> None:
        """All states are about to be restored."""
        self.forget()
        self._torn = False

    def _check_whole(self) -> None:
        if self._torn:
            raise Misuse(
                "Gradients were forgotten, or a backward raised, after units had been updated with them, and "
                "optimizer.step() never came: the weights are those of half a step, or of one that was to be left out. "
                "Restore a checkpoint, or use tz.Offload(step='overlapped'), which updates nothing before "
                "optimizer.step()."
            )

    def _begin(self, unit: Unit, stepper: Stepper) -> None:
        segments: dict[Bucket, list[Segment]] = {}
        buckets = [bucket for bucket in unit.buckets if bucket.updated_off_device]
        for segment in self._segments() or ():
            if segment.bucket in buckets:
                segments.setdefault(segment.bucket, []).append(segment)
        unit.weights.begin_update(self._updater.begin(segments, stepper))

    def catch_up(self) -> None:
        """Wait for every update, bring all weights at rest in line, and let everything be written."""
        for unit in self.units:
            unit.weights.catch_up()
        self._updater.flush().wait()

    def await_states(self) -> None:
        """Wait until no update writes what the optimizer keeps; weights at rest follow later. Not collective."""
        if any(unit.weights.updating for unit in self._off_device):
            self._updater.flush().wait()

    def await_scaling(self) -> None:
        """Wait until no update scales what it was handed; those in backward take it as it is."""
        if not self.steps_in_backward and any(unit.weights.updating for unit in self._off_device):
            self.catch_up()

    def prepare_clipping(self, max_norm: float) -> None:
        """No update reads or scales gradients from now on.

        Raises:
            Misuse: where they have been used already.
        """
        self.await_scaling()
        if self.steps_in_backward and max_norm != float("inf"):
            raise Misuse(
                "tz.clip_grad_norm_ was called, but with offload step 'backward' units have been updated while "
                "backward ran. Use tz.Offload(step='overlapped'), whose result is that of clipping on the spot; a "
                "max_norm of infinity only measures the norm."
            )
