"""Drives stock `torch.optim` optimizers over flat shards of master weights.

A user's optimizer object stays the same one, with its param groups, hyper-parameters and schedulers: only inside its
steps the tensors in its groups are others. Before its own step, these are given their gradients; after it, the updated
master weights are published to the compute weights. A step that must not happen simply finds no gradients. Of several
optimizers of one model, each has its own parameters, and leaves those of the others alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.optim.clipping import overflowed
from terrazzo.engine.optim.device_updates import DeviceUpdates
from terrazzo.engine.optim.matrices.matrix_steps import MatrixSteps
from terrazzo.engine.optim.segments.off_device_updates import OffDeviceUpdates
from terrazzo.engine.optim.segments.segment import Segment, handed_over, segments_of
from terrazzo.engine.optim.segments.swapped_groups import SwappedGroups
from terrazzo.engine.optim.stock.settings import Settings, hyper_parameters, move_step_hooks
from terrazzo.engine.optim.stock.template import Templates
from terrazzo.engine.optim.zeroing import note_zeroed
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.progress.loss_scale import DynamicLossScale, LossScale
from terrazzo.engine.progress.noted_numbers import NotedNumbers
from terrazzo.engine.progress.raised_passes import RaisedPasses
from terrazzo.engine.progress.training_progress import Progress
from terrazzo.engine.runtime.callers import is_inside_own_step
from terrazzo.engine.runtime.private_torch import plainly
from terrazzo.engine.runtime.weak import model_gone, weakly
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.errors import Misuse
from terrazzo.optim import is_matrix_group

__all__ = ["OptimizerDriver"]


class Driven(Protocol):
    """What a driver asks of the model whose weights it steps: its `Engine`."""

    sharding: ShardingSpec
    units: Sequence[Unit]
    progress: Progress
    schedule: Schedule

    @property
    def raised(self) -> RaisedPasses:
        """What is known of passes that raised."""

    def before_step(self) -> None:
        """Gradients are about to be taken, and master weights to be changed."""

    def begin_round(self) -> None:
        """Nothing refuses the step that comes, which may be the first of a round of replicas (DiLoCo). Collective."""

    def publish(self, among: Collection[Bucket] | None = None) -> None:
        """Bring compute weights of some buckets in line with updated master weights."""

    def after_step(self) -> None:
        """The optimizer has stepped, and its updates are made or under way."""


class OptimizerDriver:
    """Feeds one optimizer from the buckets of one model.

    Args:
        optimizer: its groups hold segments inside its steps, and parameters of the model otherwise.
        model: whose weights it steps, built; steps and hyper-parameters are noted in its progress.
        templates: what an `OptimizerProbe` of each of its param groups keeps.
        groups: its param groups, which get its segments.
        off_device: updates away from the device, of these; None where none are.

    Attributes:
        buckets: those with parameters of its own.
        off_device: updates away from the device.
        reference: to the optimizer, weak.
        kind: the class that it was of.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: Driven,
        templates: Templates,
        groups: SwappedGroups,
        off_device: OffDeviceUpdates | None = None,
    ) -> None:
        self._model = weakref.ref(model)  # which owns this driver
        self.units, self.progress, self.schedule = model.units, model.progress, model.schedule
        self.sharding = model.sharding
        self.groups, first = groups, groups.numbers.start
        self._unpublished = False  # from the first change of master weights until the step's end
        self._skipping: Settings | None = None  # a step that overflowed, and what there was before it
        self._owned = _owned([bucket for unit in self.units for bucket in unit.trainable()], self.groups.numbers)
        self.buckets = list(self._owned)
        groups.set_segments(segments_of(self.buckets, dict(zip(groups.numbers, templates, strict=True))))
        numbered = zip(groups.numbers, optimizer.param_groups, strict=True)
        of_matrices = {number: group for number, group in numbered if is_matrix_group(optimizer, group)}
        self._on_device = DeviceUpdates(self.sharding.precision, first, MatrixSteps(self.buckets, of_matrices))
        self.off_device = OffDeviceUpdates()
        if off_device is not None:
            self.off_device = off_device
            self.schedule.on_finished(weakly(self, OptimizerDriver._reduced))
        scaling = self.sharding.precision.loss_scaling
        self.loss_scale = DynamicLossScale(scaling) if scaling else LossScale()
        self.reference, self._retired, self.kind = weakref.ref(optimizer), False, type(optimizer)
        self.progress.hyper_parameters[first] = NotedNumbers(hyper_parameters(optimizer))
        before = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        self._step_hooks = (before.id, after.id)
        self.stay_innermost(optimizer)

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments that the optimizer steps."""
        return self.groups.segments

    def stay_innermost(self, optimizer: Optimizer) -> None:
        """Have all hooks of others around its own: they see the parameters that the optimizer was built over."""
        before, after = self._step_hooks
        move_step_hooks(optimizer, last_before=before, first_after=after)

    @property
    def model(self) -> Driven:
        """The model that it drives.

        Raises:
            Misuse: where that is gone, or has got another optimizer.
        """
        if self._retired:
            raise Misuse(
                f"This {self.kind.__name__} no longer drives a model, which another optimizer has got: step that one. "
                "It can be built anew over the model's parameters, and attached with tz.attach."
            )
        if (model := self._model()) is None:
            raise model_gone(f"What this {self.kind.__name__} steps")
        return model

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self.reference()
        assert optimizer is not None, "the optimizer is gone"
        return optimizer

    def _reduced(self, unit: int) -> None:
        if not self._retired and (optimizer := self.reference()) is not None:
            self.groups.check(optimizer)
            self.off_device.unit_reduced(unit, optimizer)

    def catch_up(self) -> None:
        """Return once no update is under way."""
        self.off_device.catch_up()

    def await_states(self) -> None:
        """Return once no update away from the device writes states; a step itself does not wait for those it began."""
        if not self.groups.stepping:
            self.off_device.await_states()

    def state_bytes(self) -> int:
        """Bytes that the optimizer itself keeps on the device, as they lie in memory; not those of buckets."""
        on_device = [segment.parameter for segment in self.segments if not segment.bucket.spec.updated_off_device]
        states = [value for parameter in on_device for value in self.optimizer.state.get(parameter, {}).values()]
        return sum(value.nbytes for value in states if isinstance(value, Tensor) and not value.is_meta)

    def retire(self) -> None:
        """Drive no longer, and let go of the model; nothing may be under way."""
        self.groups.set_segments(())
        self.buckets, self.units, self._retired = [], (), True
        self._owned, self.off_device = {}, OffDeviceUpdates()
        self._on_device = DeviceUpdates(self.sharding.precision, 0, MatrixSteps((), {}))

    # -- the step ----------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_inside_own_step(optimizer):
            return
        self._prepare(optimizer, (*args[1:2], kwargs.get("closure")))
        if self.loss_scale.skips(lambda: overflowed(self.buckets, self.sharding)):
            self._skipping = Settings(optimizer)
            self.groups.skip_step()
            return
        self.groups.recut([segment.cut(segment.seen, optimizer) for segment in self.segments])
        self._unpublished = True
        for bucket, own in self._owned.items():
            bucket.gradient.finished.expect_changes()
            for residual in bucket.gradient.residuals:
                residual.commit(own)
        self.off_device.before_step(optimizer)
        finished = handed_over([segment for segment in self.segments if segment.due])
        self._on_device.matrices.step(optimizer, self.segments, finished, self.off_device)
        self.off_device.begin(finished)
        self._on_device.begin(optimizer, self.segments, finished)

    def _prepare(self, optimizer: Optimizer, closures: Iterable[object]) -> None:
        """Have segments in the optimizer's groups, without gradients, and masters and gradients that nobody changes.

        Raises:
            Misuse: for what cannot be stepped now.
        """
        if any(closure is not None for closure in closures):
            raise Misuse(
                "optimizer.step(closure) is not supported on sharded weights. Run forward and backward first, and then "
                "call optimizer.step() without it."
            )
        model = self.model
        self.sharding.axes.tally.phases.begin("update")
        model.before_step()
        if any(bucket.gradient.unfinished for bucket in self.buckets):
            raise Misuse(
                "optimizer.step() was called while gradients were still being accumulated. Run the last micro-batch's "
                "backward outside 'with tz.accumulate(model)', so that it reduces them."
            )
        self.groups.check(optimizer)
        self.groups.check_parameters(optimizer)
        model.begin_round()
        self._skipping = None
        self.groups.hold_segments(self._on_device.excludes)
        for unit in self.units:
            unit.weights.finish_publishing()  # after a step, with no forward between: what is sent is about to change

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_inside_own_step(optimizer):
            return
        self.groups.hold_parameters()
        if self._skipping is not None:
            self._skipping.put_back(optimizer)  # such as a count of steps: there was nothing to update
        self.progress.count_step()
        for bucket, own in self._owned.items():
            bucket.gradient.note_step(own)
        self._note_hyper_parameters(optimizer)
        self._publish()  # skipped alike on all ranks
        self.off_device.after_step()
        self.model.after_step()
        self.sharding.axes.tally.phases.begin("other")

    def _note_hyper_parameters(self, optimizer: Optimizer) -> None:
        noted = self.progress.hyper_parameters
        first = self.groups.numbers.start
        noted[first] = noted[first].followed_by(hyper_parameters(optimizer))

    def _publish(self) -> None:
        unpublished, self._unpublished = self._unpublished, False
        if unpublished and (model := self._model()) is not None:
            model.publish(self._owned.keys())

    def recover(self) -> None:
        """A step may have ended without a word, since it raised: weights are those that it has left. Collective."""
        self.groups.hold_parameters()
        self._publish()

    @property
    def accumulating(self) -> bool:
        """Whether there are gradients of a step's earlier micro-batches, and not of its last."""
        return self.schedule.backward is not None or any(bucket.gradient.unfinished for bucket in self.buckets)

    @property
    def awaits_step(self) -> bool:
        """Whether parameters of its own have finished gradients that no step has taken."""
        return any(bucket.gradient.awaits_step(own) for bucket, own in self._owned.items())

    def forget(self, set_to_none: bool) -> None:
        """Gradients are about to be forgotten, or set to zero: no update uses them from now on."""
        self.groups.hold_parameters()
        if not set_to_none:
            self.catch_up()  # an update may still read what is going to be zero
        self.off_device.forget(abandoned=True)

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the gradients of its own parameters, or set finished ones to zero."""
        if not self._retired and (model := self._model()) is not None:
            trainable = (bucket for unit in model.units for bucket in unit.trainable())
            first = self.groups.numbers.start
            note_zeroed(trainable, self.schedule, self.progress, model.raised, set_to_none, first)
        self.forget(set_to_none)
        if self.schedule.backward is not None:  # it raised: gradients of all optimizers hold a part of it, or not
            self.schedule.zero_grad(set_to_none)
            return
        for bucket, own in self._owned.items():
            if len(own) == len(bucket.members):
                bucket.zero_grad(set_to_none)
            else:
                self._zero_some(bucket, own, set_to_none)

    def _zero_some(self, bucket: Bucket, own: Sequence[int], set_to_none: bool) -> None:
        """Zero its own members of a bucket; those of other optimizers, or of none, stay."""
        self.catch_up()
        bucket.gradient.zero_some(own, set_to_none)
        with plainly():
            for index in own if set_to_none else ():
                bucket.members[index].parameter.grad = None


def _owned(buckets: Iterable[Bucket], groups: Collection[int]) -> dict[Bucket, list[int]]:
    """Members that belong to one of `groups`, by bucket; buckets without any are left out."""
    owned = {bucket: [i for i, member in enumerate(bucket.members) if member.group in groups] for bucket in buckets}
    return {bucket: own for bucket, own in owned.items() if own}
