"""What torch calls in a backward: as it comes to units, to gradients, and to its end."""

from __future__ import annotations

import functools
from typing import NoReturn

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.parameters.gradient_hooks import (
    give_unscaled,
    is_accumulated,
    register_accumulate_hook,
    register_gradient_hook,
)
from terrazzo.engine.buckets.parameters.outside_forward import OutsideForward
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.hooks.driven_parts import DrivenParts
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.progress.raised_passes import RaisedPasses
from terrazzo.engine.runtime.private_torch import plainly, queue_callback
from terrazzo.engine.runtime.weak import weakly
from terrazzo.engine.schedule.backward import BackwardPass
from terrazzo.engine.schedule.program import UNKNOWN_FORWARD
from terrazzo.errors import Misuse

__all__ = ["BackwardHooks", "GradientListener"]


class GradientListener:
    """The interface for objects that follow the gradients of one model; its own methods do nothing."""

    def begin_backward(self) -> None:
        """A backward begins; none of its gradients has come."""

    def end_backward(self) -> None:
        """A backward has ended: all its gradients have come."""

    def before_use(self) -> None:
        """Gradients are about to be clipped, or taken by the optimizer."""


class BackwardHooks:
    """Hooks on the backwards of one sharded model. Torch holds them weakly, so that the model can be freed at once.

    A backward begins with the first hook that it reaches, whichever that is, and ends when autograd calls back.

    Attributes:
        listener: called at each backward, and before gradients are used.
        outside: parameters of which ranks have parts, that nothing but forwards and backwards may compute with.
        raised: what is known of passes that raised.
        surprised: whether a backward has come to a unit that nothing announced, or may do so.
    """

    def __init__(self, driven: DrivenParts) -> None:
        units, sharding = driven.units, driven.sharding
        self.units, self.schedule, self._denominator = units, driven.schedule, driven.denominator
        self._scales = sharding.precision.loss_scaling is not None
        members = (member for unit in units for bucket in unit.trainable() for member in bucket.members)
        whys = ((each.parameter, _IN_PARTS if each.in_parts else _UNSCALED) for each in members)
        self.outside = OutsideForward((each, why) for each, why in whys if self._scales or why is _IN_PARTS)
        self._agreement, self._exchanges, self._steps = driven.agreement, driven.exchanges, driven.steps
        self._tally, self._phases = sharding.axes.tally, sharding.axes.tally.phases
        self.listener = GradientListener()
        self.raised, self.surprised = RaisedPasses(), False

    def attach(self) -> None:
        """Register the hooks on the units' trainable parameters, which are outside of a forward from now on."""
        for unit in self.units:
            for number, bucket in enumerate(unit.buckets):
                for index, member in enumerate(bucket.members if bucket.spec.trainable else ()):
                    hook = functools.partial(weakly, self, trains=repr(member.name))
                    place = unit.index, number, index
                    register_accumulate_hook(member.parameter, hook(BackwardHooks.accumulate_gradient, *place))
                    if self._scales:
                        register_gradient_hook(member.parameter, hook(BackwardHooks.refuse_taken, *place))
                        give_unscaled(member.parameter, hook(BackwardHooks._loss_scale))
        self.outside.close()

    def _loss_scale(self) -> float:
        return self._denominator.loss_scale.scale

    # -- it begins ---------------------------------------------------------------------------------------------

    def start(self) -> BackwardPass:
        """Return the backward that is under way; begin one if there is none."""
        if self.schedule.backward is not None:
            return self.schedule.backward
        self._steps.recover()
        self._phases.begin("backward")
        self.outside.open()
        self.listener.begin_backward()
        trainable = (bucket for unit in self.units for bucket in unit.trainable())
        self.raised.begin_backward(any(bucket.gradient.exists for bucket in trainable))
        backward = self.schedule.begin_backward()
        queue_callback(weakly(self, BackwardHooks.end))
        return backward

    def may_surprise(self) -> None:
        """Nothing may announce the backward of what runs in a forward now."""
        self.surprised = True  # its weights stay until any backward ends, even that of another forward
        self.listener.begin_backward()  # else autograd could add to a stand-in: no hook runs before its gradient comes

    # -- it comes to units -------------------------------------------------------------------------------------

    def enter(self, index: int, generation: int, forward: int) -> None:
        """Backward comes to a call of a unit.

        Args:
            index: of the unit.
            generation: of its weights when the call ran.
            forward: number of the model's forward that the call ran in.
        """
        self._steps.recover()
        unit = self.units[index]
        if unit.weights.generation != generation:
            raise Misuse(
                f"Backward came to {unit.title}, whose weights have been changed since its forward, by "
                "optimizer.step() or by writing into them. Run the forward again, or step after its backward."
            )
        if torch.is_grad_enabled() and unit.weights.transient:
            raise Misuse(
                f"Backward with create_graph=True came to {unit.title}, whose weights are not kept for a second "
                "backward. Use a plan that keeps them whole: zero0, zero1 or zero2 in fp32."
            )
        self._exchanges.before_weights(unit, Purpose.BACKWARD)
        self.start().enter(unit, forward)
        self._tally.recorder.unit_begins(unit.index, "backward")

    def recompute(self, unit: Unit) -> None:
        """The forward of `unit` is about to run again."""
        backward = self.start()
        self._exchanges.before_weights(unit, Purpose.BACKWARD)
        backward.recompute(unit)
        self._tally.recorder.unit_begins(unit.index, "recompute")

    def use_saved(self, index: int) -> None:
        """Autograd is about to read weights of a unit that it has saved."""
        unit = self.units[index]
        if not unit.weights.present:
            self.surprised = True
            self.start().enter(unit, UNKNOWN_FORWARD)

    # -- it comes to gradients ---------------------------------------------------------------------------------

    def accumulate_gradient(self, unit_index: int, number: int, index: int, parameter: Tensor) -> None:
        """The gradient of the parameter `index` in the unit's bucket `number` has been accumulated."""
        unit = self.units[unit_index]
        bucket = unit.buckets[number]
        backward = self.schedule.backward
        if backward is None:
            with plainly():
                grad, parameter.grad = parameter.grad, None  # which was not there before this backward
                backward = self.start()
                parameter.grad = grad
        if not bucket.full.present or torch.is_grad_enabled():
            self._refuse(unit, bucket, index)
        self._denominator.passes.check_gradient(bucket.members[index].name)
        bucket.gradient.accumulate(index, bucket.members[index].parameter, backward.fate)
        backward.gradient_came(unit)

    def refuse_taken(self, unit_index: int, number: int, index: int, grad: Tensor) -> None:
        """A gradient that has the loss scale comes to a parameter. Arguments as of `accumulate_gradient`.

        Raises:
            Misuse: where it is not accumulated, but what `torch.autograd.grad` returns.
        """
        member = self.units[unit_index].buckets[number].members[index]
        if not is_accumulated(member.parameter):
            raise Misuse(
                f"torch.autograd.grad was asked for the gradient of {member.name!r}, which has the loss scale of fp16. "
                "Call backward() and measure its .grad, which has not, or train in bf16."
            )

    def _refuse(self, unit: Unit, bucket: Bucket, index: int) -> NoReturn:
        """Refuse a gradient that the engine cannot take."""
        if not bucket.full.present:
            self.surprised = True
            raise Misuse(
                f"A gradient came for {bucket.members[index].name!r} while the weights of {unit.title} were not "
                "here: its backward was reached past the outputs of its forward, which nothing had told. Return every "
                "tensor that the loss is computed from out of that module's forward, in tuples, lists or dicts; or run "
                "the step again, which is watched more closely from now on. If the module is called by a transform, "
                "such as torch.func.vmap, which hides its outputs, neither helps: call it on the whole batch instead, "
                "or take a plan that keeps weights whole, such as zero2."
            )
        raise Misuse(
            f"backward(create_graph=True) reached {bucket.members[index].name!r}, whose gradient goes into flat "
            "memory and keeps no graph. Take torch.autograd.grad(..., create_graph=True) of inputs instead."
        )

    # -- it ends -----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Autograd has ended a backward: run the program to its end. Collective."""
        if (backward := self.schedule.backward) is not None:
            self._exchanges.before_end(backward.end_label)
            backward.end()
            self.complete(backward)

    def complete(self, backward: BackwardPass) -> None:
        """The sums of all gradients have been started: agree with the other ranks, and wait for them. Collective."""
        self._agreement.agree_on_gradients(backward)  # which may start those of late ones once more
        self.schedule.end_backward()
        self._denominator.passes.end_backward()
        self.listener.end_backward()
        self.outside.close()
        self._phases.begin("other")


_UNSCALED = (
    "The outputs of that alone get the loss scale of fp16, so that the gradient of such a term would be too small by "
    "it. Compute it inside of the model's forward and return it, or train in bf16; as a penalty on weights the "
    "optimizer's weight_decay is exact. Norms that are only shown are let be."
)
_IN_PARTS = (
    "Ranks have a part each of it, or of its gradient (tp, ep), so that such a term would be of a part, or count once "
    "for each of them. Compute what is trained inside of the model's forward; as a penalty on weights the optimizer's "
    "weight_decay is exact. Norms that are only shown are let be."
)
