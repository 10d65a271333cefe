"""`parameter.grad` for loops that look at it: a stand-in for what lies in flat memory.

Between the end of a backward pass and the begin of the next one, each parameter's `.grad` is an object that can be
measured, scaled, zeroed and dropped, so that `torch.nn.utils.clip_grad_norm_` and any optimizer's `zero_grad` do what
they say. Measuring is collective; the norms of all parameters travel together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.bucket import Bucket, Member
from terrazzo.engine.buffer import Access
from terrazzo.engine.engine import Engine, engine_of
from terrazzo.engine.parameter import AtRest
from terrazzo.errors import Misuse

__all__ = ["show_gradients"]

Key = tuple[Bucket, int]
"""A bucket and the index of one of its members."""
_PLAINLY = torch._C.DisableTorchFunctionSubclass
"""Parameters at rest would answer each question in Python."""


def show_gradients(model: nn.Module) -> None:
    """From now on, `.grad` of a sharded model's parameters is not None where there is a gradient."""
    _StandIns(engine_of(model))


class _StandIns:
    """What stands in for the gradients of one model; its hooks keep this alive."""

    def __init__(self, engine: Engine) -> None:
        self._weak_engine = weakref.ref(engine)
        self.keys = [(bucket, index) for bucket in engine.trainable() for index in range(len(bucket.members))]
        self._made: dict[Key, _StandIn] = {}
        self._shown: list[Key] = []
        self._norms: dict[float, dict[Key, Tensor]] = {}
        self._measured = 0
        hooks = engine.hooks
        hooks.begun, hooks.ended, hooks.wanted = self.hide, self.show, self.notice_dropped

    @property
    def _engine(self) -> Engine:
        engine = self._weak_engine()
        assert engine is not None, "the model is gone"
        return engine

    def show(self) -> None:
        """A backward pass has ended: every finished gradient gets its stand-in."""
        with _PLAINLY():
            for number, key in enumerate(self.keys):
                gradient = key[0].gradient
                if gradient.is_finished and gradient.seen[key[1]]:
                    if key not in self._made:
                        self._made[key] = _stand_in(self, number)
                    _member(key).parameter.grad = self._made[key]
                    self._shown.append(key)

    def hide(self) -> None:
        """A backward pass begins, which must find none."""
        self.notice_dropped()
        with _PLAINLY():
            for key in self._shown:
                _member(key).parameter.grad = None
        self._shown.clear()

    def notice_dropped(self) -> None:
        """Forget gradients whose `.grad` someone has set to None since they were shown."""
        with _PLAINLY():
            dropped = [key for key in self._shown if _member(key).parameter.grad is None]
        if not dropped:
            return
        gone = set(dropped)
        self._shown = [key for key in self._shown if key not in gone]
        if not self._shown and any(bucket.gradient.is_finished for bucket, _ in dropped):
            self._engine.zero_grad(set_to_none=True)
        for key in dropped if self._shown else ():
            self.change(key, Tensor.zero_)  # later micro-batches may add to it
            key[0].gradient.seen[key[1]] = False

    def norm(self, key: Key, kind: float) -> Tensor:
        """The norm of one parameter's gradient over all ranks, 0-d fp32. Collective."""
        changes = sum(bucket.gradient.changes for bucket in self._engine.trainable())
        if changes != self._measured:
            self._norms.clear()
            self._measured = changes
        if kind not in self._norms:
            self._norms[kind] = self._measure(kind)
        return self._norms[kind][key].clone()

    def _measure(self, kind: float) -> dict[Key, Tensor]:
        engine = self._engine
        axes, split = engine.axes, engine.recipe.plan.optim.axes
        parts = torch.stack([_power(key, kind) for key in self.keys]).to(axes.device)
        highest = kind == float("inf")
        total = axes.total(parts, split, torch.amax) if highest else axes.total(parts, split) ** (1 / kind)
        return dict(zip(self.keys, total.float().unbind(), strict=True))

    def change(self, key: Key, change: Callable[[Tensor], Any]) -> None:
        """Change this rank's elements of one parameter's gradient in place."""
        driver = self._engine.driver
        if driver is not None and driver.background is not None:
            if driver.background.in_backward:
                raise Misuse(
                    f"The gradient of {_member(key).name!r} was changed, but with offload step 'backward' units are "
                    "updated while backward runs. Use tz.Offload(step='overlapped')."
                )
            driver.settle()  # an update may still read it
        key[0].gradient.changes += 1
        for opened in _parts(key, "change"):
            with opened as data:
                change(data)


def _member(key: Key) -> Member:
    return key[0].members[key[1]]


def _parts(key: Key, access: Access) -> Iterator[AbstractContextManager[Tensor]]:
    """What this rank holds of one parameter's gradient."""
    bucket, index = key
    finished = bucket.gradient.finished
    for part in finished.cuts(bucket.slots[index].range) if finished is not None else ():
        yield finished.opened(part, access)  # type: ignore[union-attr]


def _power(key: Key, kind: float) -> Tensor:
    """This rank's share of a norm before the root is taken, 0-d fp64."""
    factor, total = key[0].gradient.factor, torch.zeros((), dtype=torch.float64)
    for opened in _parts(key, "read"):
        with opened as data:
            norm = torch.linalg.vector_norm(data, kind, dtype=torch.float64).cpu()
        norm = norm if factor is None else norm * factor
        total = torch.maximum(total, norm) if kind == float("inf") else total + norm**kind
    return total


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
            return _ACTIONS[func](*args, **(kwargs or {}))
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except Misuse:
            raise Misuse(
                f"{getattr(func, '__name__', func)!s} was called on the gradient of a sharded model, whose elements "
                "are not all on this rank. It can be measured as a whole (norm), multiplied, divided, zeroed and set "
                "to None. Clip with tz.clip_grad_norm_(model, max_norm); fp16 is precision='fp16', without a "
                "GradScaler."
            ) from None


def _stand_in(owner: _StandIns, number: int) -> _StandIn:
    member = _member(owner.keys[number])
    values = torch.zeros((), dtype=member.parameter.dtype, device=member.parameter.device)
    made = torch.Tensor._make_subclass(_StandIn, values.expand(member.parameter.shape), False)
    made.owner, made.number = weakref.ref(owner), number  # a parameter owns this, and must not own itself
    made.terrazzo_name, made.terrazzo_split = f"{member.name}.grad", True
    return made


def _found(grad: _StandIn) -> tuple[_StandIns, Key]:
    owner = grad.owner()
    assert owner is not None, "the model is gone"
    return owner, owner.keys[grad.number]


def _norm(grad: _StandIn, kind: Any = "fro", dim: Any = None, keepdim: bool = False, **named: Any) -> Tensor:
    kind = named.get("ord", named.get("p", kind))
    kind = 2.0 if kind in ("fro", None) else kind
    if dim is not None or isinstance(kind, str) or not kind > 0:
        raise Misuse(f"norm({kind!r}, dim={dim}) of a sharded gradient: it can be measured as a whole, by a p-norm.")
    owner, key = _found(grad)
    return owner.norm(key, float(kind)).to(named.get("dtype") or torch.float32)


def _changed(grad: _StandIn, change: Callable[[Tensor], Any]) -> _StandIn:
    owner, key = _found(grad)
    owner.change(key, change)
    return grad


def _scale(grad: _StandIn, factor: Any) -> _StandIn:
    return _changed(grad, lambda data: data.mul_(_beside(data, factor)))


def _divide(grad: _StandIn, divisor: Any) -> _StandIn:
    return _changed(grad, lambda data: data.div_(_beside(data, divisor)))


def _beside(data: Tensor, number: Any) -> Any:
    return number.to(data.device) if torch.is_tensor(number) else number


def _zero(grad: _StandIn) -> _StandIn:
    return _changed(grad, Tensor.zero_)


def _same(grad: _StandIn, *rest: Any) -> _StandIn:
    return grad


_ACTIONS: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
    Tensor.mul_: _scale,
    Tensor.__imul__: _scale,
    Tensor.div_: _divide,
    Tensor.__itruediv__: _divide,
    Tensor.zero_: _zero,
    Tensor.data.__get__: _same,  # type: ignore[attr-defined]
    Tensor.detach: _same,
    Tensor.detach_: _same,
    Tensor.requires_grad_: _same,
}
