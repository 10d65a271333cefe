"""Connects a schedule to a model: module, parameter and autograd hooks, and the agreement at the end of a step."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from terrazzo.engine.axes import Axes
from terrazzo.engine.bucket import Bucket
from terrazzo.engine.order import Order, merge
from terrazzo.engine.precision import Precision
from terrazzo.engine.scaler import LossScaler, scale_backward
from terrazzo.engine.schedule import Schedule
from terrazzo.engine.unit import Unit
from terrazzo.errors import Misuse

__all__ = ["Hooks"]

_HALF = (torch.float16, torch.bfloat16)


class Hooks:
    """The hooks of one sharded model. They hold this object weakly, so that the model can be freed at once.

    Args:
        units: in registration order, root first.
        scaler: set when gradients inside the model are scaled.

    Attributes:
        begun, ended: told of each backward pass, before any gradient is there and when all are.
        wanted: told before gradients are clipped, or taken by the optimizer.
    """

    def __init__(
        self, units: Sequence[Unit], schedule: Schedule, axes: Axes, precision: Precision, scaler: LossScaler | None
    ) -> None:
        self.units, self.schedule, self.axes, self.precision, self.scaler = units, schedule, axes, precision, scaler
        unit_modules = {unit.module for unit in units}
        self._inside = [_modules_inside(unit.module, unit_modules) for unit in units]
        self.begun: Callable[[], None] = _ignore
        self.ended: Callable[[], None] = _ignore
        self.wanted: Callable[[], None] = _ignore
        self._late: set[int] = set()
        self._passes = 0

    def attach(self, model: nn.Module) -> None:
        """Register every hook on `model` and its units' modules and trainable parameters."""
        hooks = weakref.ref(self)
        model.register_forward_pre_hook(_before_model(hooks), with_kwargs=True, prepend=True)
        for unit in self.units:
            if unit.module is not model:
                unit.module.register_forward_pre_hook(_before_unit(hooks, unit.index), prepend=True)
                unit.module.register_forward_hook(_after_unit(hooks, unit.index))
            for bucket in unit.trainable():
                for index, member in enumerate(bucket.members):
                    hook = _gradient(hooks, unit.index, weakref.ref(bucket), index)
                    member.parameter.register_post_accumulate_grad_hook(hook)
        model.register_forward_hook(_after_model(hooks), always_call=True)

    # -- events ------------------------------------------------------------------------------------------------

    def before_model(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not _inside_backward():
            with torch._C.DisableTorchFunctionSubclass():  # parameters at rest would answer each question in Python
                for unit in self.units:
                    _check_flags(unit)
            abandoned = self.schedule.in_backward
            if self.scaler is not None:
                self.scaler.in_use = False
            self.schedule.begin_forward()
            if abandoned:
                self._forget_gradients()
        if self.units[0].is_root:
            self.before_unit(self.units[0])
        if self.precision.compute in _HALF:
            return self._cast(args), self._cast(kwargs)
        return args, kwargs

    def after_model(self, output: Any) -> Any:
        if _inside_backward():
            return output
        if output is None:  # torch calls this hook so when the forward raised
            self.schedule.abandon_forward()
            return output
        if self.units[0].is_root:
            self.after_unit(self.units[0], output)
        training = torch.is_grad_enabled()
        self.schedule.end_forward(training)
        if training and not self.schedule.order.agreed:
            self._agree_on_order()
        return scale_backward(output, self.scaler) if self.scaler else output

    def before_unit(self, unit: Unit) -> None:
        if _inside_backward():  # activation checkpointing runs the forward again
            self.start_backward()
            unit.wait()
        else:
            self.schedule.enter_forward(unit, torch.is_grad_enabled())

    def after_unit(self, unit: Unit, output: Any) -> None:
        if _inside_backward():
            return
        training = torch.is_grad_enabled()
        announced, hidden = self._watch(unit, output) if training else (False, False)
        if hidden:
            self.begun()  # nothing else may announce its backward
            self.schedule.hold_until_backward_ends(unit)
        else:
            self.schedule.leave_forward(unit, training, announced)

    def before_backward(self, unit: Unit) -> None:
        self.schedule.enter_backward(unit)

    def take_gradient(self, unit: Unit, bucket: Bucket, index: int) -> None:
        self.start_backward()
        if self.scaler is not None and not self.scaler.in_use:
            raise Misuse(
                f"A gradient reached {bucket.members[index].name!r} without passing through the model's output, so "
                "the loss scale of fp16 is missing from it. Return every tensor that a loss is computed from out of "
                "the model's forward, in tuples, lists or dicts."
            )
        dtype = self.precision.accumulate if self.schedule.sums_locally else self.precision.reduce
        bucket.gradient.take(index, bucket.members[index].parameter, dtype)
        if self.schedule.holds_back(unit) and unit.half_filled:
            self.schedule.halfway()
        if unit.index in self.schedule.closed:
            self._late.add(unit.index)

    def end_backward(self) -> None:
        if self.schedule.in_backward:
            self.schedule.end_backward()
            if not self.schedule.accumulating:
                self._agree()
            self.schedule.finish()
            if self.scaler is not None:
                self.scaler.in_use = False
            self.ended()

    def start_backward(self) -> int:
        """Note that a backward pass is under way; returns its number."""
        if not self.schedule.in_backward:
            self.begun()
            self.schedule.begin_backward()
            self._late.clear()
            self._passes += 1
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(_end(weakref.ref(self)))  # type: ignore[no-untyped-call, unused-ignore]
        return self._passes

    def _watch(self, unit: Unit, output: Any) -> tuple[bool, bool]:
        """Have the backward of `unit` announced by the tensors through which it can be reached.

        These are its outputs, and what its modules have put aside in attributes, such as an auxiliary loss.

        Returns whether it will be announced, and whether an object of unknown kind may hide a further tensor.
        """
        leaves = _leaves(output)
        hidden = any(not isinstance(leaf, _PLAIN) for leaf in leaves)
        differentiable = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        differentiable += _put_aside([unit.module, *self._inside[unit.index]])
        hook = _backward(weakref.ref(self), unit.index)
        for leaf in differentiable:
            leaf.register_hook(hook)
        return bool(differentiable), hidden

    def _cast(self, inputs: Any) -> Any:
        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self.precision.compute) if tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, cast, inputs)

    def _forget_gradients(self) -> None:
        """After a backward that raised, some gradients hold its part and some do not: none can be used."""
        for unit in self.units:
            for bucket in unit.trainable():
                bucket.zero_grad(set_to_none=True)

    # -- the end of a step -------------------------------------------------------------------------------------

    def _agree_on_order(self) -> None:
        """Compare what the ranks ran, and make it the program; see `Order`."""
        axes = self.axes
        visits = [number for visit in self.schedule.visits for number in visit]
        longest = int(axes.maximum(torch.tensor([len(visits)], device=axes.device)).item())
        own = torch.tensor(visits + [-1] * (longest - len(visits)), dtype=torch.int64, device=axes.device)
        rows = axes.rows(own).tolist()
        ranks = [[(row[i], row[i + 1]) for i in range(0, longest, 2) if row[i] >= 0] for row in rows]
        merged = merge(ranks)
        if merged is not None:
            self.schedule.order = Order.of_visits(merged, len(self.units), agreed=True)
        self.schedule.strayed = False

    def _agree(self) -> None:
        """One small reduction: which parameters got a gradient, which units got one too late, who left the order."""
        schedule = self.schedule
        buckets = [bucket for unit in self.units for bucket in unit.trainable()]
        late = [int(unit.index in self._late) for unit in self.units]
        seen = [int(flag) for bucket in buckets for flag in bucket.gradient.seen]
        values = torch.tensor([int(schedule.strayed), *late, *seen], dtype=torch.int64, device=self.axes.device)
        flags: list[int] = self.axes.maximum(values).tolist()
        late, seen = flags[1 : 1 + len(late)], flags[1 + len(late) :]
        for bucket in buckets:
            count = len(bucket.members)
            bucket.gradient.seen, seen = [bool(flag) for flag in seen[:count]], seen[count:]
        for unit in (unit for unit in self.units if late[unit.index]):
            schedule.start_reducing(unit)
        if flags[0]:
            schedule.order = dataclasses.replace(schedule.order, agreed=False)


def _ignore() -> None:
    """Nobody wants to know."""


_PLAIN = (Tensor, bool, int, float, str, type(None))


def _leaves(output: Any) -> list[Any]:
    """The leaves of a nested structure; dataclasses are opened too."""
    leaves: list[Any] = []
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            leaves += _leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            leaves.append(leaf)
    return leaves


def _put_aside(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Tensors with a gradient function among the attributes of modules."""
    values = (value for module in modules for value in vars(module).values())
    return [value for value in values if isinstance(value, Tensor) and value.grad_fn is not None]


def _modules_inside(module: nn.Module, others: Collection[nn.Module]) -> list[nn.Module]:
    """The modules inside `module`, without those inside one of `others`."""
    found = []
    for child in module.children():
        if child not in others:
            found += [child, *_modules_inside(child, others)]
    return found


def _inside_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _check_flags(unit: Unit) -> None:
    for bucket in unit.buckets:
        for member in bucket.members:
            if member.parameter.requires_grad != bucket.trainable:
                raise Misuse(
                    f"{member.name!r} had requires_grad={bucket.trainable} when the model was sharded and has "
                    f"{member.parameter.requires_grad} now. Freeze or unfreeze parameters before tz.shard."
                )


# Hook functions. Each reaches its `Hooks` through a weak reference, and stays out of compiled graphs.

HooksRef = weakref.ref[Hooks]


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch._dynamo.disable(function)  # type: ignore[no-untyped-call, unused-ignore]
    return disabled


def _before_model(hooks: HooksRef) -> Callable[..., Any]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        live = hooks()
        return live.before_model(args, kwargs) if live is not None else (args, kwargs)

    return _eager(before)


def _after_model(hooks: HooksRef) -> Callable[..., Any]:
    def after(module: nn.Module, args: Any, output: Any) -> Any:
        live = hooks()
        return live.after_model(output) if live is not None else output

    return _eager(after)


def _before_unit(hooks: HooksRef, index: int) -> Callable[..., None]:
    def before(module: nn.Module, args: Any) -> None:
        if (live := hooks()) is not None:
            live.before_unit(live.units[index])

    return _eager(before)


def _after_unit(hooks: HooksRef, index: int) -> Callable[..., None]:
    def after(module: nn.Module, args: Any, output: Any) -> None:
        if (live := hooks()) is not None:
            live.after_unit(live.units[index], output)

    return _eager(after)


def _gradient(hooks: HooksRef, unit: int, bucket: weakref.ref[Bucket], index: int) -> Callable[[Tensor], None]:
    def gradient(parameter: Tensor) -> None:
        live, owner = hooks(), bucket()
        if live is not None and owner is not None:
            live.take_gradient(live.units[unit], owner, index)

    return gradient


def _backward(hooks: HooksRef, index: int) -> Callable[[Tensor], None]:
    """Tells once per backward pass that it has reached one call of a unit, whichever of its outputs comes first."""
    told = 0

    def backward(grad: Tensor) -> None:
        nonlocal told
        live = hooks()
        if live is not None and told != live.start_backward():
            told = live.start_backward()
            live.before_backward(live.units[index])

    return backward


def _end(hooks: HooksRef) -> Callable[[], None]:
    def end() -> None:
        if (live := hooks()) is not None:
            live.end_backward()

    return end
