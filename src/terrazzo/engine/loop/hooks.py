"""Connects a schedule to a model: module, parameter and autograd hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from terrazzo.engine.buckets.bucket import Bucket, adopt_displaced
from terrazzo.engine.buckets.parameter import link_of, register_last
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.links.label import Purpose
from terrazzo.engine.loop.agreement import Agreement
from terrazzo.engine.loop.announce import Announcements
from terrazzo.engine.loop.companion import Companions
from terrazzo.engine.loop.copies import Copies
from terrazzo.engine.loop.listeners import eager, inside_backward, on_backward
from terrazzo.engine.loop.loss_scale import LossScale
from terrazzo.engine.loop.progress import Progress
from terrazzo.engine.loop.regions import Regions, is_differentiated
from terrazzo.engine.loop.saved import SavedWeights
from terrazzo.engine.loop.tree import ModuleTree
from terrazzo.engine.plan.recipe import Recipe
from terrazzo.engine.runtime.callers import runs_inside_itself
from terrazzo.engine.runtime.calls import do_nothing
from terrazzo.engine.runtime.weak import weakly, while_kept
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.engine.schedule.stages import StagedSchedule
from terrazzo.errors import Misuse

__all__ = ["Hooks"]

_HALF = (torch.float16, torch.bfloat16)


class Hooks:
    """The hooks of one sharded model. They hold this object weakly, so that the model can be freed at once.

    Args:
        units: in registration order, root first.

    Attributes:
        before_use: to be called before gradients are clipped, or taken by the optimizer.
    """

    def __init__(self, units: Sequence[Unit], schedule: Schedule, recipe: Recipe, progress: Progress) -> None:
        self.units, self.schedule, self._progress = units, schedule, progress
        self._compute, self._alone = recipe.precision.compute, recipe.axes.size() == 1
        self._nested = self._passes = 0  # forwards of the model inside its own; backwards so far
        self._refusal: str | None = None
        self._agreement, self._phases = Agreement(units, schedule, recipe.axes, progress), recipe.axes.tally.phases
        self._announcements = Announcements(units)
        self.tell_of_gradients(begun=do_nothing, ended=do_nothing, before_use=do_nothing)
        self._late: set[int] = set()
        self._regions = Regions()
        self._surprised = False  # whether backward has come to a unit unannounced
        storages: dict[int, int] = {}
        for unit in units:
            for bucket in (bucket for bucket in unit.buckets if not bucket.resident):
                bucket.list_storage(storages, unit.index)
        self._saved = SavedWeights(storages, weakly(self, Hooks.use_saved))
        self._copies = Copies(storages)
        self._companions = Companions(schedule)

    def attach(self, model: nn.Module) -> None:
        """Register every hook on `model` and its units' modules and trainable parameters."""
        model.register_forward_pre_hook(eager(weakly(self, Hooks.before_model)), with_kwargs=True, prepend=True)
        for unit in self.units:
            if unit.module is not model:
                before, after = (weakly(self, told, unit.index) for told in (Hooks.before_unit, Hooks.after_unit))
                unit.module.register_forward_pre_hook(eager(before), prepend=True)
                unit.module.register_forward_hook(eager(after))
            for member in (member for bucket in unit.buckets for member in bucket.members):
                if (link := link_of(member.parameter)) is not None:
                    link.reach = weakly(self, Hooks.reach, unit.index)
            for number, bucket in enumerate(unit.buckets):
                for index, member in enumerate(bucket.members if bucket.trainable else ()):
                    hook = while_kept(self, Hooks.accumulate_gradient, repr(member.name), unit.index, number, index)
                    register_last(member.parameter, hook)
        self._companions.find(model, self.units[0].names)
        members = [member for unit in self.units for bucket in unit.buckets for member in bucket.members]
        self._tree = ModuleTree(model, {each.parameter: each.names for each in members}, self._alone)
        for module in model.modules():
            module.register_state_dict_post_hook(eager(weakly(self._copies, Copies.in_state_dict)))
        model.register_forward_hook(eager(weakly(self, Hooks.after_model)))
        model.register_forward_hook(eager(weakly(self, Hooks.model_ended)), always_call=True)

    def tell_of_gradients(
        self, *, begun: Callable[[], None], ended: Callable[[], None], before_use: Callable[[], None]
    ) -> None:
        """Call these from now on.

        Args:
            begun, ended: for each backward pass, before any gradient is there and when all are.
            before_use: before gradients are clipped, or taken by the optimizer.
        """
        self._begun, self._ended, self.before_use = begun, ended, before_use

    @property
    def loss_scale(self) -> LossScale:
        return self._progress.denominator.loss_scale

    # -- events ------------------------------------------------------------------------------------------------

    def before_model(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The model's forward is about to run, for the first time or again in backward; returns its inputs, cast."""
        if self._inside_itself(module):
            self._nested += 1
        elif not inside_backward():
            self._begin_forward(module)
        if self.units[0].is_root:
            self.before_unit(0)
        return (self._cast(args), self._cast(kwargs)) if self._compute in _HALF else (args, kwargs)

    def _begin_forward(self, model: nn.Module) -> None:
        """Start from what the user and the last pass have left, be it a backward that raised."""
        self._phases.begin("forward" if torch.is_grad_enabled() else "evaluate")
        self.adopt_edits()
        self._tree.check(model)
        unsettled = not self.schedule.order.agreed or self.schedule.awaits_backward
        self.loss_scale.begin_forward(model)
        if self.schedule.in_backward:  # it raised: some gradients hold a part of it and some do not
            self._progress.backward_raised()
            self.schedule.forget_gradients()
        if torch.is_grad_enabled():
            self._progress.begin_forward()
        self.schedule.begin_forward(torch.is_grad_enabled())
        self._regions.begin()
        if torch.is_grad_enabled() and (self._surprised or unsettled):
            self._saved.begin()

    def adopt_edits(self) -> None:
        """Take over what the user has written into weights, or refuse it."""
        with torch._C.DisableTorchFunctionSubclass():  # parameters at rest would answer each question in Python
            buckets = [bucket for unit in self.units for bucket in unit.buckets]
            adopt_displaced(buckets)
            for bucket in buckets:
                bucket.adopt_edits()

    def refuse_forwards(self, why: str | None) -> None:
        """From now on, no forward may gather weights; None: it may again."""
        self._refusal = why

    def _inside_itself(self, model: nn.Module) -> bool:
        """Whether the forward that begins was called in the model's own; one may also have ended without a word."""
        if not self.schedule.in_forward or inside_backward():
            return False
        if not (inside := runs_inside_itself(model)):
            self._nested = 0
        return inside

    def after_model(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The model's forward has returned `output`; returns what the user gets. Collective until ranks agree."""
        output = self._copies.of_output(output)
        if self._nested and not inside_backward():
            if self.units[0].is_root:
                self.after_unit(0, module, args, output)
            return output
        if inside_backward():  # a reentrant checkpoint around the model differentiates what it runs again
            return self.loss_scale.of_output(output) if is_differentiated() else output
        if self.units[0].is_root:
            self.after_unit(0, module, args, output)
        self._announcements.leave_leaves()
        training = torch.is_grad_enabled()
        self._companions.end(Purpose.END_OF_FORWARD)
        self.schedule.end_forward()
        if training and not self.schedule.order.agreed:
            self._agreement.on_order()
        return self.loss_scale.of_output(output) if self.schedule.ends_model else output

    def model_ended(self, module: nn.Module, args: Any, output: Any) -> None:
        """The model's own forward has returned, or raised."""
        if self._nested and not inside_backward():
            self._nested -= 1
        elif not inside_backward():
            self._saved.end()
            self.loss_scale.end_forward(module)
            if self.schedule.in_forward:
                self._progress.forward_raised(torch.is_grad_enabled())
                self.schedule.abandon_forward()

    def before_unit(self, index: int, module: nn.Module | None = None, args: Any = ()) -> None:
        """The forward of the unit `index` is about to run, for the first time or again in backward."""
        unit = self.units[index]
        if not self._runs(unit, module):
            return
        if self._refusal is not None and unit.transient:
            raise Misuse(self._refusal)
        if inside_backward():  # activation checkpointing runs the forward again
            self.start_backward()
            self._companions.come_to(unit, Purpose.BACKWARD)
            self.schedule.recompute(unit)
            return
        if not self.schedule.in_forward and torch.is_grad_enabled():
            self.loss_scale.check_unit(unit.title)
        if not self.schedule.order.agreed and (pair := self._regions.enter(index, args)):
            self.schedule.program.join([pair])
        self._companions.come_to(unit, Purpose.FORWARD)
        self.schedule.enter_forward(unit)

    def _runs(self, unit: Unit, module: nn.Module | None) -> bool:
        """Not in a deep copy, which has the hooks of what it was copied from, or where it is another stage's turn."""
        return (module is None or module is unit.module) and self.schedule.program.has(unit.index)

    def after_unit(self, index: int, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward of a unit has returned `output`, through whose tensors its backward will be announced.

        Returns:
            What its caller gets: copies of gathered weights in place of views, which end when they are released.
        """
        unit = self.units[index]
        if not self._runs(unit, module):
            return output
        output = self._copies.of_output(output)
        if inside_backward():
            if is_differentiated() and self._watch(unit, output)[0]:
                self.schedule.expect_backward(unit)
            return output
        training = torch.is_grad_enabled()
        announced, opaque = self._watch(unit, output) if training else (False, False)
        if opaque:
            self._surprised = True  # what holds it ends with any backward, be it another forward's
            self._begun()  # nothing else may announce its backward
            self.schedule.hold_until_backward_ends(unit)
        else:
            self.schedule.leave_forward(unit, training, announced or (not training and self._regions.reentrant))
        return output

    def reach(self, index: int) -> bool:
        """Weights of a unit are asked for outside of its own forward: inside the model's, they are gathered.

        They stay until backward ends, since nothing announces where that comes to them; without gradients until this
        forward does.

        Returns: whether they are here.
        """
        unit = self.units[index]
        if not self.schedule.in_forward or inside_backward():
            return False
        self.schedule.enter_forward(unit)
        if torch.is_grad_enabled():
            self._surprised = True
            self._begun()
            self.schedule.hold_until_backward_ends(unit)
        return all(bucket.present for bucket in unit.buckets)

    def before_backward(self, unit: Unit, generation: int, forward: int | None) -> None:
        """Backward comes to a call of `unit`, which ran in that forward, when its weights were of `generation`."""
        if unit.generation != generation:
            raise Misuse(
                f"Backward came to {unit.title}, whose weights have been changed since its forward, by "
                "optimizer.step() or by writing into them. Run the forward again, or step after its backward."
            )
        if torch.is_grad_enabled() and unit.transient:
            raise Misuse(
                f"Backward with create_graph=True came to {unit.title}, whose weights are not kept for a second "
                "backward. Use a plan that keeps them whole: zero0, zero1 or zero2 in fp32."
            )
        self._companions.come_to(unit, Purpose.BACKWARD)
        self.schedule.enter_backward(unit, forward)

    def use_saved(self, index: int) -> None:
        """A part of backward is about to read the weights of a unit."""
        unit = self.units[index]
        if not unit.present:
            self._surprised = True
            self.start_backward()
            self.schedule.enter_backward(unit, forward=0)

    def accumulate_gradient(self, unit_index: int, number: int, index: int, parameter: Tensor) -> None:
        """The gradient of the parameter `index` in the unit's bucket `number` has been accumulated."""
        unit = self.units[unit_index]
        bucket = unit.buckets[number]
        if not self.schedule.in_backward:
            with torch._C.DisableTorchFunctionSubclass():
                grad, parameter.grad = parameter.grad, None  # which was not there before this backward
                self.start_backward()
                parameter.grad = grad
        if not bucket.present or torch.is_grad_enabled():
            self._refuse(unit, bucket, index)
        self.loss_scale.check_gradient(bucket.members[index].name)
        dtype = bucket.pending_dtype(self.schedule.this_pass)
        bucket.gradient.accumulate(index, bucket.members[index].parameter, dtype)
        if self.schedule.awaits_half_of(unit) and unit.half_filled:
            self.schedule.halfway()
        if unit.index in self.schedule.closed:
            self._late.add(unit.index)

    def _refuse(self, unit: Unit, bucket: Bucket, index: int) -> NoReturn:
        """A gradient came where it cannot be taken."""
        if not bucket.present:
            self._surprised = True
            raise Misuse(
                f"A gradient came for {bucket.members[index].name!r} while the weights of {unit.title} were not "
                "here: its backward was reached past the outputs of its forward, which nothing had told. Return every "
                "tensor that the loss is computed from out of that module's forward, in tuples, lists or dicts; or run "
                "the step again, which is watched more closely from now on."
            )
        raise Misuse(
            f"backward(create_graph=True) reached {bucket.members[index].name!r}, whose gradient goes into flat "
            "memory and keeps no graph. Take torch.autograd.grad(..., create_graph=True) of inputs instead."
        )

    def end_backward(self) -> None:
        """Autograd has come to the end of a backward: finish gradients, and hear of other ranks'. Collective."""
        if self.schedule.in_backward:
            self._companions.end(Purpose.END_OF_BACKWARD)
            self.schedule.end_backward()
            self._finish()

    def end_step(self, schedule: StagedSchedule) -> None:
        """Every micro-batch of a step in stages has run: the same of what they have added up. Collective."""
        schedule.end_step()
        self._late.clear()  # to sums that had not begun
        self._finish()

    def _finish(self) -> None:
        self._agreement.on_gradients(self._late)
        self.schedule.finish()
        self.loss_scale.end_backward()
        self._ended()
        self._phases.begin("other")

    def start_backward(self) -> int:
        """Note that a backward pass is under way; returns its number."""
        if not self.schedule.in_backward:
            self._phases.begin("backward")
            self._begun()
            trainable = (bucket for unit in self.units for bucket in unit.trainable())
            self._progress.begin_backward(any(bucket.gradient.exists for bucket in trainable))
            self.schedule.begin_backward()
            self._late.clear()
            self._passes += 1
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(weakly(self, Hooks.end_backward))  # type: ignore[no-untyped-call, unused-ignore]
        return self._passes

    def _watch(self, unit: Unit, output: Any) -> tuple[bool, bool]:
        tell = on_backward(self, unit.index, unit.generation, self.schedule.forward_number)
        return self._announcements.watch(unit, output, tell)

    def _cast(self, inputs: Any) -> Any:
        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self._compute) if tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, cast, inputs)
