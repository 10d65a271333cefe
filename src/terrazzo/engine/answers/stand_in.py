"""`parameter.grad` for loops that look at it: a stand-in for what lies in flat memory.

Between the end of a backward pass and the begin of the next one, each parameter's `.grad` is an object that can be
measured, scaled, clamped, zeroed and dropped, so that `torch.nn.utils.clip_grad_norm_` and any optimizer's `zero_grad`
do what they say. Measuring is collective; the norms of all parameters travel together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor, nn

from terrazzo.engine.answers.by_hand import put_back, set_before, set_by_hand
from terrazzo.engine.answers.factors import beside, check_numbers, text_of
from terrazzo.engine.answers.measured import measured_gradient, measures
from terrazzo.engine.border.parameter import AtRest, torch_names
from terrazzo.engine.bucket import Bucket
from terrazzo.engine.loop.listeners import eager, inside_backward, weakly
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.optim.clipping import norms
from terrazzo.engine.partition import Member
from terrazzo.errors import Misuse

__all__ = ["show_gradients"]

Key = tuple[Bucket, int]
"""A bucket and the index of one of its members."""
_PLAINLY = torch._C.DisableTorchFunctionSubclass
"""Parameters at rest would answer each question in Python."""


def show_gradients(model: nn.Module, engine: Engine) -> None:
    """From now on, `.grad` of a sharded model's parameters is not None where there is a gradient.

    Not inside its forward, where a compiler would ask them what they cannot answer.
    """
    owner = _StandIns(engine)
    model.register_forward_pre_hook(eager(weakly(owner, _StandIns.begin_forward)), prepend=True)
    model.register_forward_hook(eager(weakly(owner, _StandIns.show_again)), always_call=True)


class _Shelf:
    """The trainable parameters of a bucket and what stands in for their gradients.

    Args:
        first: number of its first parameter among those of the model.
    """

    def __init__(self, owner: _StandIns, bucket: Bucket, first: int) -> None:
        self.bucket = bucket
        self.parameters = [member.parameter for member in bucket.members]
        self.stand_ins = [_stand_in(owner, member, first + i) for i, member in enumerate(bucket.members)]
        self._numbered = list(zip(range(len(self.parameters)), self.parameters, self.stand_ins, strict=True))
        self.shown: list[tuple[int, nn.Parameter, _StandIn]] = []

    @property
    def wanted(self) -> bool:
        """Whether there is a gradient, be it one that further micro-batches add to."""
        return self.bucket.gradient.held

    def show(self) -> None:
        self.shown = list(compress(self._numbered, self.bucket.gradient.seen))
        for _, parameter, stand_in in self.shown:
            parameter.grad = stand_in

    def take_away(self) -> None:
        for _, parameter, _ in self.shown if self.wanted else ():  # else the optimizer's zero_grad has done so
            parameter.grad = None
        self.shown = []

    def dropped(self) -> list[int]:
        """Parameters whose `.grad` someone has set to None.

        Raises:
            Misuse: for one that was set to a tensor.
        """
        seen, indices = self.bucket.gradient.seen, list[int]()
        for index, parameter, stand_in in self.shown:
            grad = parameter.grad
            if grad is stand_in:
                continue
            if grad is None and seen[index]:
                indices.append(index)
            elif grad is not None:
                raise set_by_hand(self.bucket.members[index])
        return indices

    def foreign(self) -> Iterator[tuple[Member, bool]]:
        """Parameters with a `.grad` that no step would use, and whether it stands for a gradient that was forgotten."""
        counted = self.bucket.gradient.seen if self.wanted else [False] * len(self.parameters)
        for index, parameter, stand_in in self._numbered:
            if (grad := parameter.grad) is not None and not (grad is stand_in and counted[index]):
                yield self.bucket.members[index], grad is stand_in


class _StandIns:
    """What stands in for the gradients of one model; its hooks keep this alive."""

    def __init__(self, engine: Engine) -> None:
        self._weak_engine = weakref.ref(engine)
        self._buckets = engine.trainable()
        self.keys = [(bucket, index) for bucket in self._buckets for index in range(len(bucket.members))]
        self._shelves: list[_Shelf] = []
        self._shown: list[_Shelf] = []
        self._norms: dict[float, dict[Key, Tensor]] = {}
        self._measured = 0
        engine.hooks.tell_of_gradients(begun=self.begin_backward, ended=self.show, before_use=self.before_use)
        before = weakly(self, _StandIns.begin)  # else autograd would add to a stand-in
        for unit in engine.units:
            for bucket in unit.trainable() if not unit.regathered else ():  # which nobody reaches without a word before
                for member in bucket.members:
                    member.parameter.register_hook(before)

    @property
    def _engine(self) -> Engine:
        engine = self._weak_engine()
        assert engine is not None, "the model is gone"
        return engine

    def show(self) -> None:
        """A backward pass has ended: every gradient gets its stand-in."""
        with _PLAINLY():
            self._shown = [shelf for shelf in self._all_shelves() if shelf.wanted]
            for shelf in self._shown:
                shelf.show()

    def _all_shelves(self) -> list[_Shelf]:
        if not self._shelves:
            firsts = [0]
            for bucket in self._buckets:
                firsts.append(firsts[-1] + len(bucket.members))
            self._shelves = [_Shelf(self, *each) for each in zip(self._buckets, firsts, strict=False)]
        return self._shelves

    def take_away(self) -> None:
        """A backward pass begins, which must find none."""
        if self._shown:
            self.notice_dropped()
            with _PLAINLY():
                for shelf in self._shown:
                    shelf.take_away()
            self._shown = []

    def begin_backward(self) -> None:
        """A backward pass begins, and adds to the `.grad` that users have set.

        Raises:
            Misuse: where that would be divided as gradients are which have been multiplied before.
        """
        self._engine.drivers.turn_back()
        self.take_away()
        if not self._engine.progress.denominator.is_mean:
            with _PLAINLY():
                for shelf in self._all_shelves():
                    for member, is_forgotten in shelf.foreign():
                        raise put_back(member) if is_forgotten else set_before(member)

    def begin_forward(self, *_: Any) -> None:
        """A forward begins: whoever has caught what a step raised goes on."""
        self._engine.drivers.turn_back()
        self.begin()

    def begin(self, *_: Any) -> None:
        """A forward begins, or a gradient comes, maybe before anything has announced a backward pass."""
        if self._shown:
            self.take_away()

    def show_again(self, *_: Any) -> None:
        """A forward has ended; one inside backward recomputes a part of it."""
        if not inside_backward() and any(bucket.gradient.changes for bucket in self._buckets):
            self.show()

    def before_use(self) -> None:
        """Gradients are about to be clipped or taken, which are those of the engine alone.

        Raises:
            Misuse: where a parameter that is stepped has another one, which would change nothing.
        """
        with _PLAINLY():
            for shelf in self._all_shelves():
                for member, is_forgotten in shelf.foreign():
                    if member.group >= 0 and self._learns():
                        raise put_back(member) if is_forgotten else set_by_hand(member)
        self.notice_dropped()

    def _learns(self) -> bool:
        """Whether a step would change anything: torch has states made by one of zeros, at a learning rate of 0."""
        groups = (group for driver in self._engine.drivers.stepping() for group in driver.optimizer.param_groups)
        return any(float(group.get("lr", 1)) != 0 for group in groups)

    def notice_dropped(self) -> None:
        """Forget gradients whose `.grad` someone has set to None since they were shown."""
        with _PLAINLY():
            dropped = [(shelf.bucket, shelf.dropped()) for shelf in self._shown if shelf.wanted]
        names = [bucket.members[index].name for bucket, indices in dropped for index in indices]
        if not names:
            return
        if all(len(indices) == sum(bucket.gradient.seen) for bucket, indices in dropped):
            self._engine.zero_grad(set_to_none=True)
            return
        self._prepare_change(names[0])
        for name in names:
            self._engine.progress.note(f"{name}.grad = None")
        for bucket, indices in dropped:
            bucket.gradient.forget(indices)  # later micro-batches may add to the others

    def norm(self, key: Key, kind: float) -> Tensor:
        """The norm of one parameter's gradient over all ranks, 0-d fp32. Collective."""
        self._check_finished(_member(key).name)
        changes = sum(bucket.gradient.changes for bucket in self._buckets)
        if changes != self._measured:
            self._norms.clear()
            self._measured = changes
        if kind not in self._norms:
            self._norms[kind] = self._measure(kind)
        return self._norms[kind][key].clone()

    def measured(self, key: Key, func: Any, *rest: Any, **named: Any) -> Any:
        """What `func`, one that measures, makes of one parameter's gradient."""
        self._check_finished(_member(key).name)
        self._await_scaling()
        return measured_gradient(self._engine, *key, func, *rest, **named)

    def _await_scaling(self) -> None:
        for driver in self._engine.drivers:
            driver.prepare_clipping(float("inf"))  # an update may still scale what it was handed

    def _measure(self, kind: float) -> dict[Key, Tensor]:
        engine = self._engine
        self._await_scaling()
        total = norms(([bucket.gradient.given(index)] for bucket, index in self.keys), engine.recipe, kind)
        return dict(zip(self.keys, total.float().unbind(), strict=True))

    def change(self, key: Key, what: str, change: Callable[[Tensor], Any]) -> None:
        """Change this rank's elements of one parameter's gradient in place; `what` is done on every rank."""
        bucket, index = key
        name = bucket.members[index].name
        self._prepare_change(name)
        self._engine.progress.note(f"{name}.grad.{what}")
        bucket.gradient.change(index, change)

    def _prepare_change(self, name: str) -> None:
        """Refuse a change of the gradient of `name` where there can be none now.

        Raises:
            Misuse: there.
        """
        self._check_finished(name)
        for driver in self._engine.drivers:
            if driver.steps_in_backward:
                raise Misuse(
                    f"The gradient of {name!r} was changed, but with offload step 'backward' units are "
                    "updated while backward runs. Use tz.Offload(step='overlapped')."
                )
            driver.catch_up()  # an update may still read it

    def _check_finished(self, name: str) -> None:
        if any(bucket.gradient.unfinished for bucket in self._buckets):
            raise Misuse(
                f"The gradient of {name!r} was looked at or changed while gradients were still being accumulated. Run "
                "the last micro-batch's backward outside 'with tz.accumulate(model)' first; zero_grad() of the "
                "optimizer or the model forgets them."
            )


def _member(key: Key) -> Member:
    return key[0].members[key[1]]


class _StandIn(AtRest):
    """Shape, dtype and device of a gradient; what is not one of the actions below raises `Misuse`."""

    owner: weakref.ref[_StandIns]
    number: int

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _ACTIONS and isinstance(args[0], _StandIn):
            return _ACTIONS[func](*args, **torch_names(kwargs or {}))
        if measures(func) and args and isinstance(args[0], _StandIn):
            owner, key = _found(args[0])
            return owner.measured(key, func, *args[1:], **(kwargs or {}))
        if func in _FOR_EACH and all(isinstance(grad, _StandIn) for grad in args[0]):
            return _for_each(_FOR_EACH[func], *args, **torch_names(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def _refusal(cls, touched: AtRest | None) -> str:
        assert touched is not None, "torch calls this for an argument of the class"
        return (
            f"{touched.terrazzo_link.name!r}, a gradient of a sharded model, whose elements are not all on this rank. "
            "It can be measured as a whole (norm, sum, abs().max(), isfinite().all() and the like), multiplied, "
            "divided, clamped, zeroed and set to None. Clip with "
            "tz.clip_grad_norm_(model, max_norm); fp16 is precision='fp16', without a GradScaler."
        )


def _stand_in(owner: _StandIns, member: Member, number: int) -> _StandIn:
    made = _StandIn.blank(member.parameter, f"{member.name}.grad")
    made.owner, made.number = weakref.ref(owner), number  # a parameter owns this, and must not own itself
    return made


def _found(grad: _StandIn) -> tuple[_StandIns, Key]:
    owner = grad.owner()
    assert owner is not None, "the model is gone"
    return owner, owner.keys[grad.number]


def _norm(grad: _StandIn, kind: Any = "fro", dim: Any = None, keepdim: bool = False, **named: Any) -> Tensor:
    kind, dtype = named.pop("ord", named.pop("p", kind)), named.pop("dtype", None)
    kind = 2.0 if kind in ("fro", None) else kind
    owner, key = _found(grad)
    asked = {"dim": dim, "keepdim": keepdim, **named}
    rare = {name: each for name, each in asked.items() if each is not None and each is not False}
    if rare or isinstance(kind, str) or not kind > 0:
        return cast(Tensor, owner.measured(key, torch.linalg.vector_norm, kind, dtype=dtype, **rare))
    return owner.norm(key, float(kind)).to(dtype or torch.float32)


def _changed(grad: _StandIn, what: str, change: Callable[[Tensor], Any]) -> _StandIn:
    owner, key = _found(grad)
    owner.change(key, what, change)
    return grad


def _scale(grad: _StandIn, other: Any) -> _StandIn:
    check_numbers(other)
    return _changed(grad, f"mul_({text_of(other)})", lambda data: data.mul_(beside(data, other)))


def _divide(grad: _StandIn, other: Any, **named: Any) -> _StandIn:
    check_numbers(other)
    return _changed(grad, f"div_({text_of(other)})", lambda data: data.div_(beside(data, other), **named))


def _clamp(grad: _StandIn, *bounds: Any, **named: Any) -> _StandIn:
    check_numbers(*bounds, *named.values())
    what = ", ".join([*map(text_of, bounds), *(f"{name}={text_of(bound)}" for name, bound in sorted(named.items()))])
    return _changed(grad, f"clamp_({what})", lambda data: data.clamp_(*bounds, **named))


def _zero(grad: _StandIn) -> _StandIn:
    return _changed(grad, "zero_()", Tensor.zero_)


def _same(grad: _StandIn, *rest: Any) -> _StandIn:
    return grad


_ACTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.linalg.vector_norm, torch.norm, Tensor.norm), _norm),
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__), _scale),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__), _divide),
    Tensor.clamp_: _clamp,
    Tensor.zero_: _zero,
    **dict.fromkeys((Tensor.data.__get__, Tensor.detach, Tensor.detach_, Tensor.requires_grad_), _same),  # type: ignore[attr-defined]
}


def _for_each(action: Callable[..., Any], grads: Sequence[_StandIn], *rest: Any, **named: Any) -> Any:
    """An action of torch's that takes a list of tensors, and for each a number, or one for all."""
    if rest and isinstance(rest[0], list | tuple):
        return tuple(action(grad, number, *rest[1:], **named) for grad, number in zip(grads, rest[0], strict=True))
    return tuple(action(grad, *rest, **named) for grad in grads)


_FOR_EACH: dict[Any, Callable[..., Any]] = {
    torch._foreach_norm: _norm,
    torch._foreach_mul_: _scale,
    torch._foreach_div_: _divide,
    torch._foreach_zero_: _zero,
    torch._foreach_clamp_min_: _clamp,
    torch._foreach_clamp_max_: lambda grad, high: _clamp(grad, None, high),
}
