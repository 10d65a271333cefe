"""What torch calls in a forward: as one of the model, or of a unit, begins and ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.autograd.announcements import Announcements
from terrazzo.engine.autograd.listeners import eager, inside_backward, on_backward
from terrazzo.engine.autograd.recomputed import Regions, is_differentiated
from terrazzo.engine.autograd.saved_weights import SavedWeights
from terrazzo.engine.autograd.weight_copies import WeightCopies
from terrazzo.engine.buckets.parameters.note import note_of
from terrazzo.engine.buckets.take_over import take_over_edits
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.buckets.weights.full_memory import Storages
from terrazzo.engine.hooks.backward_hooks import BackwardHooks
from terrazzo.engine.hooks.broken_promises import BrokenPromises
from terrazzo.engine.hooks.driven_parts import DrivenParts
from terrazzo.engine.hooks.module_tree import ModuleTree
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.progress.scaled_passes import Passes
from terrazzo.engine.runtime.callers import calls_of
from terrazzo.engine.runtime.calls import do_nothing
from terrazzo.engine.runtime.private_torch import tree_map_only, unseen
from terrazzo.engine.runtime.weak import weakly
from terrazzo.engine.schedule.gathered import BackwardToCome
from terrazzo.errors import Misuse
from terrazzo.marks import UNIT

__all__ = ["ForwardHooks"]

_HALF = (torch.float16, torch.bfloat16)


class ForwardHooks:
    """Hooks around the forwards of one sharded model. Torch holds them weakly, so that the model can be freed at once.

    A call of the model is a pass, or lies inside of the call that is the pass, or is run again by activation
    checkpointing inside of backward. The hooks tell these apart by the call stack. Counting calls would not do: where a
    user's hook raises, a call may begin or end without reaching the engine's hooks.
    """

    def __init__(self, model: nn.Module, driven: DrivenParts, backward: BackwardHooks) -> None:
        units, sharding = driven.units, driven.sharding
        self._units, self._schedule, self._denominator = units, driven.schedule, driven.denominator
        self._agreement, self._exchanges, self._steps = driven.agreement, driven.exchanges, driven.steps
        self._backward, self._outside = backward, backward.outside
        self._tally, self._phases = sharding.axes.tally, sharding.axes.tally.phases
        self._compute, self._alone = sharding.precision.compute, not sharding.axes.live(sharding.axes.whole_mesh)
        self._promises = BrokenPromises(units, sharding.axes.is_first(sharding.axes.within_stage))
        self.refuse(None)
        self._pass_call: Callable[[], Callable[..., Any] | None] = do_nothing  # weakly, the call that is the pass
        members = [member for unit in units for bucket in unit.buckets for member in bucket.members]
        self._tree = ModuleTree(model, {each.parameter: each.names for each in members})
        storages = Storages()
        for unit in units:
            for bucket in unit.buckets:
                bucket.full.list_in(storages, unit.index)
        self._saved = SavedWeights(storages, weakly(backward, BackwardHooks.use_saved))
        self._copies, self._announcements, self._regions = WeightCopies(storages), Announcements(units), Regions()

    def attach(self, model: nn.Module) -> None:
        """Register the hooks on `model`, its modules and its units' parameters."""
        model.register_forward_pre_hook(eager(weakly(self, ForwardHooks.before_model)), with_kwargs=True, prepend=True)
        for unit in self._units:
            UNIT.leave(unit.module, unit.name)
            if unit.module is not model:
                methods = (ForwardHooks.before_unit, ForwardHooks.after_unit)
                before, after = (weakly(self, each, unit.index) for each in methods)
                unit.module.register_forward_pre_hook(eager(before), prepend=True)
                unit.module.register_forward_hook(eager(after))
            for member in (member for bucket in unit.buckets for member in bucket.members):
                if (note := note_of(member.parameter)) is not None:
                    note.reach = weakly(self, ForwardHooks.reach, unit.index)
        for module in model.modules():
            module.register_state_dict_post_hook(eager(weakly(self._copies, WeightCopies.in_state_dict)))
        model.register_forward_hook(eager(weakly(self, ForwardHooks.after_model)))
        model.register_forward_hook(eager(weakly(self, ForwardHooks.model_ended)), always_call=True)

    def refuse(self, why: str | None) -> None:
        """From now on, no forward may gather weights; None: it may again."""
        self._refusal = why

    @property
    def _passes(self) -> Passes:
        return self._denominator.passes

    # -- the model ---------------------------------------------------------------------------------------------

    def before_model(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A forward of the model is about to run; returns its inputs, cast."""
        again = inside_backward()
        begins = not again and not self._is_in_pass(module)
        if begins:
            self._pass_call = weakref.ref(next(calls_of(module)))
            self._begin(module)
        if self._units[0].is_root:
            self.before_unit(0)
        if self._denominator.loss_scale.scales and (begins or again) and torch.is_grad_enabled():
            args, kwargs = self._passes.of_inputs((args, kwargs))
        return (self._cast(args), self._cast(kwargs)) if self._compute in _HALF else (args, kwargs)

    def _is_in_pass(self, model: nn.Module) -> bool:
        """Whether the call of the model that runs now is inside of that which is the pass."""
        if self._schedule.forward is None:
            return False
        own = self._pass_call()
        return any(call is own for call in islice(calls_of(model), 1, None))

    def _is_pass(self, model: nn.Module) -> bool:
        """Whether the call of the model that runs now is the pass."""
        return next(calls_of(model)) is self._pass_call()

    def _begin(self, model: nn.Module) -> None:
        """A pass begins: settle what the user and the last pass have left, such as a backward that raised."""
        training, schedule = torch.is_grad_enabled(), self._schedule
        self._steps.recover()
        self._outside.open()
        self._phases.begin("forward" if training else "evaluate")
        take_over_edits(bucket for unit in self._units for bucket in unit.buckets)
        self._tree.check(model, lets_in=self._alone and not self._denominator.loss_scale.scales)
        unsettled = not schedule.order.agreed or schedule.awaits_backward
        self._passes.begin_forward(model)
        if schedule.backward is not None:  # it raised: some gradients hold a part of it and some do not
            self._backward.raised.backward_raised()
            schedule.zero_grad()
        if training:
            self._backward.raised.begin_forward()
        schedule.begin_forward(training)
        self._regions.begin()
        if training and (self._backward.surprised or unsettled):
            self._saved.begin()

    def after_model(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A forward of the model has returned `output`; returns what its caller gets. Collective where a pass ends."""
        output = self._copies.of_output(output)
        if inside_backward():  # a reentrant checkpoint around the model differentiates what it runs again
            return self._passes.of_output(output) if is_differentiated() else output
        if self._units[0].is_root:
            self.after_unit(0, module, args, output)
        return self._end(output) if self._is_pass(module) else output

    def _end(self, output: Any) -> Any:
        """The pass ends; returns what the user gets."""
        schedule, forward = self._schedule, self._schedule.forward
        self._announcements.leave_leaves()
        training = torch.is_grad_enabled()
        assert forward is not None, "before_model has begun it"
        self._exchanges.before_end(forward.end_label)
        schedule.end_forward()
        if training and not schedule.order.agreed:
            self._agreement.agree_on_order(forward.end_label)
            self._promises.order_agreed(schedule.order.forward)
        return self._passes.of_output(output) if schedule.ends_model else output

    def model_ended(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward of the model has returned, or raised."""
        if self._is_pass(module):
            self._outside.close()
            self._saved.end()
            self._passes.end_forward(module)
            if self._schedule.forward is not None:
                self._backward.raised.forward_raised(torch.is_grad_enabled())
                self._schedule.abandon_forward()

    def _cast(self, inputs: Any) -> Any:
        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self._compute) if tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, cast, inputs)

    # -- units: in a pass of the model, again in backward, or called alone ----------------------------------------

    def before_unit(self, index: int, module: nn.Module | None = None, args: Any = ()) -> None:
        """The forward of the unit `index` is about to run."""
        unit = self._units[index]
        if not self._runs_here(unit, module):
            return
        if self._refusal is not None and unit.weights.transient:
            raise Misuse(self._refusal)
        with unseen():
            self._enter(unit, args)

    def _enter(self, unit: Unit, args: Any) -> None:
        """Have the weights of a unit, whose forward begins with these arguments."""
        if inside_backward():
            self._backward.recompute(unit)
            return
        self._steps.before_forward(unit.index)
        forward = self._schedule.forward
        if forward is None:
            self._steps.recover()
            self._outside.open()
            if torch.is_grad_enabled():
                self._passes.check_unit(unit.title)
        if not self._schedule.order.agreed and (pair := self._regions.enter(unit.index, args)):
            self._schedule.program.join([pair])
        self._exchanges.before_weights(unit, Purpose.FORWARD)
        self._schedule.enter_alone(unit) if forward is None else forward.enter(unit)
        self._tally.recorder.unit_begins(unit.index, "forward")

    def after_unit(self, index: int, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward of a unit has returned `output`, through whose tensors its backward will be announced.

        Returns:
            What its caller gets: copies of gathered weights in place of views, which end when they are released.
        """
        unit = self._units[index]
        if not self._runs_here(unit, module):
            return output
        self._tally.recorder.unit_ends(index)
        output = self._copies.of_output(output)
        if inside_backward():
            if is_differentiated() and self._watch(unit, output)[0]:
                self._backward.start().expect(unit)
            return output
        to_come = self._backward_to_come(unit, output)
        with unseen():
            if (forward := self._schedule.forward) is None:
                self._schedule.leave_alone(unit, to_come)
                self._outside.close()
            else:
                forward.leave(unit, to_come)
        return output

    def _backward_to_come(self, unit: Unit, output: Any) -> BackwardToCome:
        """What is known of the backward of a unit's call that has returned `output`."""
        if not torch.is_grad_enabled():
            return BackwardToCome.RECOMPUTED if self._regions.reentrant else BackwardToCome.NONE
        announced, opaque = self._watch(unit, output)
        if announced and unit.forward_only:
            self._promises.backward_to_come(unit)
        if opaque:
            self._backward.may_surprise()
            return BackwardToCome.UNANNOUNCED
        return BackwardToCome.ANNOUNCED if announced else BackwardToCome.NONE

    def _runs_here(self, unit: Unit, module: nn.Module | None) -> bool:
        """Whether a call is of the unit itself, whose deep copies have its hooks, and of the stage whose turn it is."""
        return (module is None or module is unit.module) and self._schedule.program.has(unit.index)

    def _watch(self, unit: Unit, output: Any) -> tuple[bool, bool]:
        """Have the backward of its call announced: see `Announcements.watch`."""
        hook = on_backward(self._backward, unit.index, unit.weights.generation, self._schedule.forward_number)
        return self._announcements.watch(unit, output, hook)

    def reach(self, index: int) -> bool:
        """Somebody reads weights of a unit outside of its own forward: gather them, if the model's forward runs.

        They stay until backward ends, since nothing announces their own backward; without gradients, until this forward
        ends.

        Returns: whether they can be read now.
        """
        unit, forward = self._units[index], self._schedule.forward
        if forward is None or inside_backward():
            return False
        self._steps.before_forward(index)
        with unseen():
            forward.enter(unit)
            if torch.is_grad_enabled():
                self._backward.may_surprise()
                forward.leave(unit, BackwardToCome.UNANNOUNCED)
        return unit.weights.present
