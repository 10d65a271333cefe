"""What stands in for a gradient that lies in flat memory on several ranks: to be measured, and to be changed.

Measuring is collective; elements cannot be read.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor

from terrazzo.engine.buckets.parameters.placeholder import Placeholder
from terrazzo.engine.interception.gradients.gradient_answers import GradientAnswers, GradientKey
from terrazzo.engine.interception.measuring.measures import can_be_measured, order_of_norm
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.runtime.device import is_cuda
from terrazzo.engine.runtime.overrides import arguments_text, by_torch_names
from terrazzo.engine.runtime.private_torch import FOREACH
from terrazzo.engine.runtime.weak import model_gone
from terrazzo.errors import Misuse

__all__ = ["GradientStandIn"]


class GradientStandIn(Placeholder):
    """Shape, dtype and device of a gradient; what is not one of the actions below raises `Misuse`."""

    answers: weakref.ref[GradientAnswers]
    number: int

    @classmethod
    def of(cls, member: Member, answers: GradientAnswers, number: int) -> Self:
        """The gradient of a parameter, which is the one of that number among `answers.keys`."""
        made = cls.blank(member.parameter, f"{member.name}.grad")
        made.answers, made.number = weakref.ref(answers), number  # a parameter owns this, and must not own itself
        return made

    def _answer(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        is_first = bool(args) and args[0] is self
        if is_first and func in _ACTIONS:
            return _ACTIONS[func](*args, **by_torch_names(kwargs))
        if is_first and can_be_measured(func):
            answers, key = _answers_for(self)
            return answers.measured(key, func, *args[1:], **kwargs)
        if func in _FOR_EACH and args and all(isinstance(grad, GradientStandIn) for grad in args[0]):
            return _for_each(_FOR_EACH[func], *args, **by_torch_names(kwargs))
        return super()._answer(func, args, kwargs)

    def _refusal(self) -> str:
        return (
            f"{self.terrazzo_note.name!r}, a gradient of a sharded model, whose elements are not all on this rank. "
            "It can be measured as a whole (norm, sum, abs().max(), isfinite().all() and the like), multiplied, "
            "divided, clamped, zeroed and set to None, and sign_() and nan_to_num_() change it. Clip with "
            "tz.clip_grad_norm_(model, max_norm); fp16 is precision='fp16', without a GradScaler."
        )


def _answers_for(grad: GradientStandIn) -> tuple[GradientAnswers, GradientKey]:
    if (answers := grad.answers()) is None:
        raise model_gone(f"The gradient {grad.terrazzo_note.name!r}")
    return answers, answers.keys[grad.number]


def _check_numbers(*numbers: Any) -> None:
    """Refuse a number for each element, which ranks that hold other elements would take from the wrong places.

    Raises:
        Misuse: there.
    """
    for number in numbers:
        if torch.is_tensor(number) and number.numel() != 1:
            raise Misuse(
                f"A sharded gradient was multiplied, divided or clamped by a tensor of {number.numel()} elements: it "
                "takes one number. To mask elements, multiply the weight by the mask in the module's forward."
            )


def _on_device_of(data: Tensor, number: Any) -> Any:
    """`number` on the device of `data`, if it is a tensor."""
    return number.to(data.device) if torch.is_tensor(number) else number


def _norm(grad: GradientStandIn, kind: Any = "fro", dim: Any = None, keepdim: bool = False, **named: Any) -> Tensor:
    kind, dtype = order_of_norm(kind, named), named.pop("dtype", None)
    answers, key = _answers_for(grad)
    options = {"dim": dim, "keepdim": keepdim, **named}
    rare = {name: each for name, each in options.items() if each is not None and each is not False}
    if rare or isinstance(kind, str) or not kind > 0 or dtype == torch.float64:  # norms for clipping sum rows in fp32
        return cast(Tensor, answers.measured(key, torch.linalg.vector_norm, kind, dtype=dtype, **rare))
    norm = answers.norm(key, float(kind))
    return norm if dtype is None else norm.to(dtype)


def _change(name: str, grad: GradientStandIn, *numbers: Any, **named: Any) -> GradientStandIn:
    """`grad`, changed by torch's method of that name with these numbers."""
    change: Callable[..., Tensor] = getattr(Tensor, name)
    _check_numbers(*numbers, *named.values())
    answers, key = _answers_for(grad)
    there = [each for each in (*numbers, *named.values()) if torch.is_tensor(each) and is_cuda(each.device)]

    def change_here(data: Tensor) -> Tensor:
        moved = {name: _on_device_of(data, number) for name, number in named.items()}
        return change(data, *(_on_device_of(data, number) for number in numbers), **moved)

    answers.change(key, f"{name}({arguments_text(numbers, named)})", change_here, there, hides_overflow=name in _HIDING)
    return grad


_HIDING = ("clamp_", "sign_", "nan_to_num_")
"""Methods after which what was not finite may be."""
_CHANGES = {name: functools.partial(_change, name) for name in ("mul_", "div_", *_HIDING)}
"""Methods that change each element by itself, with numbers that all ranks have."""


def _zero(grad: GradientStandIn) -> GradientStandIn:
    answers, key = _answers_for(grad)
    answers.zero(key)
    return grad


def _same(grad: GradientStandIn, *rest: Any) -> GradientStandIn:
    return grad


_ACTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.linalg.vector_norm, torch.norm, Tensor.norm), _norm),
    **{getattr(Tensor, name): change for name, change in _CHANGES.items()},
    Tensor.__imul__: _CHANGES["mul_"],
    Tensor.__itruediv__: _CHANGES["div_"],
    Tensor.zero_: _zero,
    **dict.fromkeys((Tensor.data.__get__, Tensor.detach, Tensor.detach_), _same),  # type: ignore[attr-defined]
}


def _for_each(action: Callable[..., Any], grads: Sequence[GradientStandIn], *rest: Any, **named: Any) -> Any:
    """An action of torch's that takes a list of tensors, and for each a number, or one for all."""
    if rest and isinstance(rest[0], list | tuple):
        return tuple(action(grad, number, *rest[1:], **named) for grad, number in zip(grads, rest[0], strict=True))
    return tuple(action(grad, *rest, **named) for grad in grads)


_FOR_EACH: dict[Any, Callable[..., Any]] = {
    FOREACH["norm"]: _norm,
    FOREACH["mul_"]: _CHANGES["mul_"],
    FOREACH["div_"]: _CHANGES["div_"],
    FOREACH["zero_"]: _zero,
    FOREACH["clamp_min_"]: _CHANGES["clamp_"],
    FOREACH["clamp_max_"]: lambda grad, high: _CHANGES["clamp_"](grad, None, high),
}
