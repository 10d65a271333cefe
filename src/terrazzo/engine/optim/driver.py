"""Drives stock `torch.optim` optimizers over flat shards of master weights.

A user's optimizer object stays the same one, with its param groups, hyper-parameters and schedulers: only inside its
steps the tensors in its groups are others. Before its own step, these are given their gradients; after it, the updated
master weights are published to the compute weights. A step that must not happen simply finds no gradients. Of several
optimizers of one model, each has its own parameters, and leaves those of the others alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from terrazzo.engine.accord.hyper_parameters import HyperParameters
from terrazzo.engine.accord.loss_scale import DynamicLossScale, LossScale
from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.buffer import Buffer
from terrazzo.engine.buckets.summed import SummedGradient
from terrazzo.engine.optim.clipping import stacked
from terrazzo.engine.optim.groups import ParamGroups
from terrazzo.engine.optim.kept import KeptStates
from terrazzo.engine.optim.matrices import MatrixSteps
from terrazzo.engine.optim.protocols import Driven, NoUpdates, OffDeviceUpdates
from terrazzo.engine.optim.segment import Segment, segments_of
from terrazzo.engine.optim.settings import Settings
from terrazzo.engine.optim.stepper import Stepper, bring_home
from terrazzo.engine.optim.stock import hyper_parameters, move_step_hooks
from terrazzo.engine.optim.template import Templates
from terrazzo.engine.optim.zeroing import note_zeroed
from terrazzo.engine.runtime.callers import is_inside_own_step
from terrazzo.engine.runtime.private_torch import plainly
from terrazzo.engine.runtime.weak import model_gone, weakly
from terrazzo.errors import Misuse
from terrazzo.optim import is_matrix_group

__all__ = ["OptimizerDriver"]


class OptimizerDriver:
    """Feeds one optimizer from the buckets of one model.

    Args:
        optimizer: its groups hold segments inside its steps, and parameters of the model otherwise.
        model: whose weights it steps, built; steps and hyper-parameters are noted in its progress.
        templates: what an `OptimizerProbe` of each of its param groups keeps.
        first: number of the first among those of all the model's optimizers.

    Attributes:
        groups: its param groups.
        buckets: those with parameters of its own.
        segments: what the optimizer steps.
        background: updates away from the device.
        reference: to the optimizer, weak.
        kind: the class that it was of.
    """

    def __init__(self, optimizer: Optimizer, model: Driven, templates: Templates, first: int) -> None:
        self._model = weakref.ref(model)  # which owns this driver
        self.units, self.progress, self.schedule = model.units, model.progress, model.schedule
        self.sharding = self.units[0].sharding
        self.groups = ParamGroups(optimizer, first)
        self._stepping = False
        self._unpublished = False  # from the first change of master weights until the step's end
        self._skipping: Settings | None = None  # a step that overflowed, and what there was before it
        self._owned = _owned([bucket for unit in self.units for bucket in unit.trainable()], self.groups.numbers)
        self.buckets = list(self._owned)
        self.segments = segments_of(self.buckets, dict(zip(self.groups.numbers, templates, strict=True)))
        groups = dict(zip(self.groups.numbers, optimizer.param_groups, strict=True))
        of_matrices = {number: group for number, group in groups.items() if is_matrix_group(optimizer, group)}
        self._matrices = MatrixSteps(self.buckets, of_matrices)
        self.background: OffDeviceUpdates = NoUpdates()
        scaling = self.sharding.precision.loss_scaling
        self.loss_scale = DynamicLossScale(scaling) if scaling else LossScale()
        self.reference, self._retired, self.kind = weakref.ref(optimizer), False, type(optimizer)
        self._moments_differ = self.sharding.precision.moments != self.sharding.precision.master
        self.progress.hyper_parameters[first] = HyperParameters(hyper_parameters(optimizer))
        before = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        self._step_hooks = (before.id, after.id)
        self.stay_innermost(optimizer)

    def _fill_groups(self) -> None:
        if self._stepping:
            self.groups.hold_segments(each for each in self.segments if not self._is_stepped_apart(each))
        else:
            self.groups.hold_parameters()

    def stay_innermost(self, optimizer: Optimizer) -> None:
        """Have all hooks of others around its own: they see the parameters that the optimizer was built over."""
        before, after = self._step_hooks
        move_step_hooks(optimizer, last_before=before, first_after=after)

    def _turn(self, stepping: bool) -> None:
        self._stepping = stepping
        self._fill_groups()

    def _is_stepped_apart(self, segment: Segment) -> bool:
        """Whether the optimizer's own step is to leave it alone, without a gradient too: it decays all, perhaps."""
        apart = self._moments_differ or segment.bucket.updated_off_device or self._matrices.has(segment)
        return self._skipping is not None or apart

    @property
    def model(self) -> Driven:
        """What it drives.

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

    def update_off_device(self, make: Callable[[Callable[[], list[Segment] | None]], OffDeviceUpdates]) -> None:
        """Have segments away from the device updated by what `make` returns; it is given what returns them."""
        self.background = make(weakly(self, lambda driver: driver.segments))
        self.schedule.on_finished(weakly(self, OptimizerDriver._reduced))

    def _reduced(self, unit: int) -> None:
        if not self._retired and (optimizer := self.reference()) is not None:
            self.groups.check(optimizer)
            self.background.unit_reduced(unit, optimizer)

    def catch_up(self) -> None:
        """Return once no update is under way."""
        self.background.catch_up()

    def await_states(self) -> None:
        """Return once no update away from the device writes states; a step itself does not wait for those it began."""
        if not self._stepping:
            self.background.await_states()

    def begin_restoring(self) -> None:
        """All states are about to be restored."""
        self.background.begin_restoring()

    @property
    def steps_in_backward(self) -> bool:
        """Whether parameters are updated while backward runs."""
        return self.background.steps_in_backward

    def state_bytes(self) -> int:
        """What the optimizer keeps on the device, as it lies in memory."""
        here = [segment.parameter for segment in self.segments if not segment.bucket.updated_off_device]
        kept = [value for parameter in here for value in self.optimizer.state.get(parameter, {}).values()]
        return sum(value.nbytes for value in kept if isinstance(value, Tensor))

    def await_scaling(self) -> None:
        """Wait until no update scales what it was handed."""
        self.background.await_scaling()

    def prepare_clipping(self, max_norm: float) -> None:
        """No update reads or scales gradients from now on; a `max_norm` of infinity only measures them.

        Raises:
            Misuse: where they have been used already.
        """
        self.background.prepare_clipping(max_norm)

    def retire(self) -> None:
        """Drive no longer, and let go of the model; nothing may be under way."""
        self.buckets, self.segments, self.units, self._retired = [], [], (), True
        self._owned, self.background, self._matrices = {}, NoUpdates(), MatrixSteps((), {})

    # -- the step ----------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_inside_own_step(optimizer):
            return
        self._prepare(optimizer, (*args[1:2], kwargs.get("closure")))
        if self.loss_scale.skips(self._overflowed):
            self._skipping = Settings(optimizer)
            self._fill_groups()
            return
        self._cut_segments(optimizer)
        self._unpublished = True
        for bucket in self.buckets:
            bucket.gradient.changes += 1  # it is in the hands of an optimizer, which may change it in place
        self.background.begin(optimizer)
        here = [segment for segment in self.segments if not segment.bucket.updated_off_device]
        finished = _handed_over([segment for segment in here if segment.due])
        self._matrices.step(optimizer, here, lambda segment: _give_gradient(segment, finished))
        here = [segment for segment in here if not self._matrices.has(segment)]
        if self._moments_differ:
            self._step_one_by_one(optimizer, here, finished)
        else:
            for segment in here:
                _give_gradient(segment, finished)

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
        model.prepare_step()
        if any(bucket.gradient.unfinished for bucket in self.buckets):
            raise Misuse(
                "optimizer.step() was called while gradients were still being accumulated. Run the last micro-batch's "
                "backward outside 'with tz.accumulate(model)', so that it reduces them."
            )
        self.groups.check(optimizer)
        self.groups.check_parameters(optimizer)
        self._skipping = None
        self._turn(stepping=True)
        self.drop_segment_gradients()
        for unit in self.units:
            unit.finish_publishing()  # a step behind a step, with no forward between: what is sent is about to change

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_inside_own_step(optimizer):
            return
        self.restore_groups()
        if self._skipping is not None:
            self._skipping.put_back(optimizer)  # such as a count of steps: there was nothing to update
        self.progress.end_step()
        self._note_hyper_parameters(optimizer)
        self._publish()  # skipped alike on all ranks
        self.background.end_step()
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
        self.restore_groups()
        self._publish()

    def restore_groups(self) -> None:
        """A step has ended, be it by raising: the optimizer's groups hold parameters again."""
        if self._stepping:
            for segment in self.segments:
                if isinstance(segment.bucket.master, Buffer):
                    bring_home(segment.parameter, segment.bucket.master.part(segment.range))
            self._turn(stepping=False)
            self.drop_segment_gradients()

    def drop_segment_gradients(self) -> None:
        """Segments have gradients inside a step alone."""
        for segment in self.segments:
            segment.parameter.grad = None

    def _cut_segments(self, optimizer: Optimizer) -> None:
        self.recut([segment.cut(segment.seen, optimizer) for segment in self.segments])

    def recut(self, parts: list[list[Segment]]) -> None:
        """Put `parts` in the place of the segments that they were cut from."""
        segments = [segment for pieces in parts for segment in pieces]
        if segments != self.segments:
            self.segments = segments
            self._fill_groups()

    def _step_one_by_one(
        self, optimizer: Optimizer, segments: Sequence[Segment], finished: Mapping[Bucket, SummedGradient]
    ) -> None:
        """Moments live in their own dtype: bring one segment's to the master's, step it alone, put them back."""
        stepper = Stepper(optimizer, self.groups.numbers.start)  # the optimizer's own step is still to come
        for segment in segments:
            if segment.due or stepper.is_own:
                _give_gradient(segment, finished)
                KeptStates(segment).step(stepper, segment.parameter)
                segment.parameter.grad = None

    @property
    def accumulating(self) -> bool:
        """Whether there are gradients of a step's earlier micro-batches, and not of its last."""
        return self.schedule.backward is not None or any(bucket.gradient.unfinished for bucket in self.buckets)

    def _overflowed(self) -> bool:
        """Whether any rank holds a non-finite gradient."""
        axes, known = self.sharding.axes, (bucket.gradient.is_finite() for bucket in self.buckets)
        finite = [each for each in known if each is not None]
        every = stacked(finite, axes.device).all() if finite else torch.ones((), dtype=torch.bool, device=axes.device)
        flag = every.logical_not().long().view(1)
        overflow = axes.maximum(flag, axes.with_stages)
        return bool(overflow.item())  # the one number of an fp16 step that the host waits for

    def forget(self, set_to_none: bool) -> None:
        """Gradients are about to be forgotten, or set to zero: no update uses them from now on."""
        self.restore_groups()
        if not set_to_none:
            self.catch_up()  # an update may still read what is going to be zero
        self.background.forget(abandoned=True)

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the gradients of its own parameters, or set finished ones to zero."""
        if not self._retired and (model := self._model()) is not None:
            trainable = (bucket for unit in model.units for bucket in unit.trainable())
            note_zeroed(trainable, self.schedule, self.progress, set_to_none, self.groups.numbers.start)
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
        """What other optimizers have of a bucket, or none has, stays."""
        self.catch_up()
        bucket.gradient.zero_some(own, set_to_none)
        with plainly():
            for index in own if set_to_none else ():
                bucket.members[index].parameter.grad = None


def _owned(buckets: Iterable[Bucket], groups: Collection[int]) -> dict[Bucket, list[int]]:
    """By bucket the members that belong to one of `groups`, where there are any."""
    owned = {bucket: [i for i, member in enumerate(bucket.members) if member.group in groups] for bucket in buckets}
    return {bucket: own for bucket, own in owned.items() if own}


def _handed_over(due: Sequence[Segment]) -> dict[Bucket, SummedGradient]:
    """The finished gradients of these segments."""
    buckets = {segment.bucket: None for segment in due}
    return {b: b.gradient.handed_over([each.range for each in due if each.bucket is b]) for b in buckets}


def _give_gradient(segment: Segment, finished: Mapping[Bucket, SummedGradient]) -> None:
    if segment.due:
        segment.parameter.grad = segment.gradient(finished[segment.bucket])
