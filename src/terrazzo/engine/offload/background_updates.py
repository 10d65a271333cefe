"""When states away from the device are updated: behind the next forward, behind backward, or on the spot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.gradients.summed import SummedGradient
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.offload.options import StepMode
from terrazzo.engine.offload.updater import ElementwiseStep, Updater
from terrazzo.engine.optim.segments.off_device_updates import Half, OffDeviceUpdates, SegmentWork
from terrazzo.engine.optim.segments.segment import Segment, handed_over
from terrazzo.engine.optim.segments.swapped_groups import SwappedGroups
from terrazzo.engine.optim.stock.stepper import Stepper
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.errors import Misuse

__all__ = ["BackgroundUpdates"]


@dataclass(frozen=True)
class _Idle:
    """No unit has been updated for a step that is still to come."""


@dataclass(frozen=True)
class _Ahead:
    """Units, whose numbers are `begun`, have been updated in backward, before the others and `optimizer.step()`."""

    stepper: Stepper
    begun: frozenset[int]


@dataclass(frozen=True)
class _InStep:
    """Inside of `optimizer.step()`, which is about to begin the updates of `units`."""

    stepper: Stepper
    units: Sequence[Unit]


@dataclass(frozen=True)
class _Torn:
    """Units, `begun`, have been updated for a step that was given up, and `unrestored` has not been restored since."""

    begun: frozenset[int]
    unrestored: frozenset[Half]


class BackgroundUpdates(OffDeviceUpdates):
    """Starts the updates of one model's units, and waits for them.

    It is in one of four states, and what comes sets the next one; a dash where it stays:

        what comes         while _Idle              while _Ahead                     while _InStep  while _Torn
        unit_reduced       _Ahead, step 'backward'  _Ahead, with one more            as _Idle       refused
        before_step        _InStep                  _InStep; other settings: _Torn   as _Idle       refused
        begin              never                    never                            _Idle          never
        forget             -                        _Idle                            _Idle          -
        forget, abandoned  -                        _Torn                            _Idle          -
        restored           -                        -                                -              _Idle, by both

    Args:
        groups: of the optimizer, whose segments are updated.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: Schedule,
        updater: Updater,
        mode: StepMode,
        groups: SwappedGroups,
    ) -> None:
        self.units, self.schedule, self.mode, self.steps_in_backward = units, schedule, mode, mode == "backward"
        self._updater, self._groups, self._first = updater, groups, groups.numbers.start
        self._off_device = [unit for unit in units if any(bucket.spec.updated_off_device for bucket in unit.buckets)]
        self._state: _Idle | _Ahead | _InStep | _Torn = _Idle()

    def unit_reduced(self, index: int, optimizer: Optimizer) -> None:
        """The gradients of a unit are finished: update it at once, where that may be, and every parameter has one."""
        unit = self.units[index]
        self._require_whole("Backward")
        begun = self._state.begun if isinstance(self._state, _Ahead) else frozenset()
        if index in begun:
            raise Misuse(
                f"Gradients of {unit.title} came after its update had begun: with offload step "
                "'backward' a step has one backward of each unit outside 'with tz.accumulate(model)', and "
                "optimizer.step() follows it. Or use tz.Offload(step='overlapped')."
            )
        at_once = self.steps_in_backward and unit in self._off_device and not self._has_matrices(unit)
        if at_once and all(all(b.gradient.seen) for b in unit.trainable()):
            stepper = self._stepper(optimizer)
            self._state = _Ahead(stepper, begun | {index})
            unit.weights.catch_up()
            self._begin(unit, stepper, handed_over([each for each in self._of(unit.buckets) if each.due]))

    def _stepper(self, optimizer: Optimizer) -> Stepper:
        """What steps all units of one step: hyper-parameters are those of its first update."""
        return self._state.stepper if isinstance(self._state, _Ahead) else Stepper(optimizer, self._first)

    def before_forward(self, index: int) -> None:
        if isinstance(self._state, _Ahead | _Torn) and index in self._state.begun:
            self.require_step_taken(f"A forward of {self.units[index].title}", reads="weights")

    def before_step(self, optimizer: Optimizer) -> None:
        self._require_whole("optimizer.step()")
        begun: frozenset[int] = frozenset()
        if isinstance(self._state, _Ahead):
            begun = self._state.begun
            if changed := self._state.stepper.changed_since(optimizer):
                self.forget(abandoned=True)
                raise Misuse(
                    f"The optimizer's {', '.join(changed)} changed between backward and optimizer.step(), but with "
                    "offload step 'backward' units are updated while backward runs. Change hyper-parameters after "
                    "optimizer.step(), or use tz.Offload(step='overlapped')."
                )
        order = dict.fromkeys([*self.schedule.order.forward, *range(len(self.units))])
        units = [unit for index in order if index not in begun and (unit := self.units[index]) in self._off_device]
        for unit in units:
            unit.weights.catch_up()
        self._state = _InStep(self._stepper(optimizer), units)

    def carry_out(
        self,
        work: SegmentWork,
        segments: Sequence[Segment],
        optimizer: Optimizer,
        finished: Mapping[Bucket, SummedGradient],
    ) -> None:
        buckets = list(dict.fromkeys(segment.bucket for segment in segments))
        held = {bucket: self._of([bucket]) for bucket in buckets}
        self._updater.begin(work, held, dict.fromkeys(segments, True), optimizer.state, finished).wait()

    def begin(self, finished: Mapping[Bucket, SummedGradient]) -> None:
        """Begin the updates, in the order of forward."""
        assert isinstance(self._state, _InStep), "the step has not been prepared"
        step, self._state = self._state, _Idle()
        for unit in step.units:
            self._begin(unit, step.stepper, finished)

    def after_step(self) -> None:
        """`optimizer.step()` returns."""
        if self.mode == "synchronous":
            self.catch_up()

    def forget(self, abandoned: bool = False) -> None:
        """Gradients are forgotten.

        Args:
            abandoned: whether the step is given up: units that have been updated already are ahead of the others, or
                all have been stepped though nobody asked for it.
        """
        match self._state:
            case _Torn():
                pass  # until weights and states are restored
            case _Ahead(begun=begun) if abandoned:
                self._state = _Torn(begun, frozenset({"weights", "states"}))
            case _:
                self._state = _Idle()

    def require_step_taken(self, what: str, reads: Half | None = None) -> None:
        if isinstance(self._state, _Torn) and reads in self._state.unrestored:
            self._require_whole(what)
        if isinstance(self._state, _Ahead):
            raise Misuse(
                f"{what} came between backward and optimizer.step(), but with offload step 'backward' units have been "
                "updated already, and others have not. Do it after optimizer.step(), run earlier micro-batches inside "
                "'with tz.accumulate(model):', or use "
                "tz.Offload(step='overlapped'), which updates nothing before."
            )

    def restored(self, what: Half) -> None:
        if isinstance(self._state, _Torn):
            unrestored = self._state.unrestored - {what}
            self._state = _Torn(self._state.begun, unrestored) if unrestored else _Idle()

    def _require_whole(self, what: str) -> None:
        if isinstance(self._state, _Torn):
            raise Misuse(
                f"{what} came after gradients that were forgotten, or a backward that raised, after units had been "
                "updated with them, and optimizer.step() never came: the weights are those of half a step, or of one "
                "that was to be left out. Restore a checkpoint, or use tz.Offload(step='overlapped'), which updates "
                "nothing before optimizer.step()."
            )

    def _begin(self, unit: Unit, stepper: Stepper, finished: Mapping[Bucket, SummedGradient]) -> None:
        segments: dict[Bucket, list[Segment]] = {}
        for segment in self._of(unit.buckets):
            segments.setdefault(segment.bucket, []).append(segment)
        elementwise = [each for own in segments.values() for each in own if each.template.matrices is None]
        stepped = {segment: has for segment in elementwise if (has := segment.due) or stepper.is_own}
        unit.weights.begin_update(
            self._updater.begin(ElementwiseStep(stepper), segments, stepped, stepper.state, finished)
        )

    def _of(self, buckets: Sequence[Bucket]) -> list[Segment]:
        """The segments of some buckets that are stepped away from the device."""
        away = [bucket for bucket in buckets if bucket.spec.updated_off_device]
        return [segment for segment in self._groups.segments if segment.bucket in away]

    def _has_matrices(self, unit: Unit) -> bool:
        """Whether it waits for `optimizer.step()`: ranks exchange matrices there, in one order."""
        return any(segment.template.matrices is not None for segment in self._of(unit.buckets))

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
