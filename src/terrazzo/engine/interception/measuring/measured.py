"""Parameters at rest and finished gradients can be measured: `parameter.norm()`, `parameter.isnan().any()`.

No weights are moved. A function that computes each element from that element alone gives a `Measured`, which stays
split over ranks; a measure makes one number of it (`measures`), on every rank. Of a parameter that ranks along `tp`
share, the number is of the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.parameters.note import note_of
from terrazzo.engine.buckets.parameters.placeholder import Placeholder
from terrazzo.engine.buckets.resting.counted_once import sums_over
from terrazzo.engine.interception.measuring.measures import (
    ALIASES,
    ELEMENTWISE,
    MEASURES,
    SplitValues,
    Spread,
    can_be_measured,
)
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.overrides import arguments_text, by_torch_names, function_name
from terrazzo.engine.runtime.weak import weakly
from terrazzo.errors import Misuse

__all__ = ["let_measure", "measured_gradient"]

_WEIGHTS_ARE_READ = "inside 'with tz.gathered(model):'"
_GRADIENTS_ARE_READ = "before ranks sum it, in a function that parameter.register_hook calls"
"""Where single elements can be read, for errors."""


def let_measure(engine: Engine) -> None:
    """From now on, parameters can be measured while their values are split."""
    for number, bucket in enumerate(engine.buckets()):
        for index, member in enumerate(bucket.members):
            if (note := note_of(member.parameter)) is not None:
                note.measure = weakly(engine, _measure, number, index)


def _measure(engine: Engine, number: int, index: int, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What `func` makes of the parameter that it was called on; None if it is nothing that can be measured.

    Args:
        number: of the bucket among those of the model.
        index: of the parameter in the bucket.
    """
    bucket = engine.buckets()[number]
    member, slot = bucket.members[index], bucket.slots[index]
    if not can_be_measured(func) or not args or args[0] is not member.parameter:
        return None
    engine.requires.step_taken(f"A measure of {member.name!r}", reads="weights")
    engine.catch_up()
    part = bucket.as_seen(bucket.weight.copied(slot.range, engine.axes.device)).to(member.parameter.dtype)
    over = (*bucket.spec.weight_axes, *engine.axes.cut_along(member.family))
    spread = Spread(engine.axes, over, math.prod(member.shape))
    differentiable = member.trainable and func not in ALIASES
    values = SplitValues(member.name, member.name, len(member.shape), part, spread, _WEIGHTS_ARE_READ)
    measured = Measured.of(values, member.parameter, differentiable)
    return Measured.__torch_function__(func, (Measured,), (measured, *args[1:]), named)


def measured_gradient(engine: Engine, bucket: Bucket, index: int, func: Any, *rest: Any, **named: Any) -> Any:
    """What `func`, one that measures, makes of a finished gradient.

    Args:
        index: of the parameter in `bucket`.
        rest, named: what `func` is called with beside.
    """
    member, axes = bucket.members[index], engine.axes
    name = f"{member.name}.grad"
    if (finished := bucket.gradient.finished.sum) is None:
        raise Misuse(
            f"{name!r} was measured after it had been forgotten, by zero_grad() say. Measure it between backward() and "
            "zero_grad()."
        )
    part = bucket.gradient.finished.contribution(index)
    part = torch.empty(0, dtype=finished.data.dtype, device=HOST) if part is None else part
    spread = Spread(axes, sums_over(engine.sharding), math.prod(member.shape))
    values = SplitValues(name, name, len(member.shape), part.to(axes.device), spread, _GRADIENTS_ARE_READ)
    measured = Measured.of(values, member.parameter)
    return Measured.__torch_function__(func, (Measured,), (measured, *rest), named)


class Measured(Placeholder):
    """One value for each element of a parameter or of a gradient, of which this rank holds a part.

    Attributes:
        local: this rank's part.
        differentiable: whether plain torch would record how they were computed, for a gradient.
    """

    local: SplitValues
    differentiable: bool

    @classmethod
    def of(cls, values: SplitValues, like: Tensor, differentiable: bool = False) -> Self:
        """Make one of `values`, which are those of a tensor of the shape and device of `like`."""
        made = cls.blank(like, values.name, values.part.dtype)
        made.local, made.differentiable = values, differentiable
        return made

    def _answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        is_first = bool(args) and args[0] is self
        if is_first and func in ELEMENTWISE and not _has_tensors(args[1:], kwargs):
            return self._elementwise(func, args[1:], kwargs)
        if is_first and func in MEASURES:
            return self._number(func, args[1:], kwargs)
        return super()._answer(func, args, kwargs)

    def _elementwise(self, func: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Self:
        """What `func` makes of each value."""
        with torch.no_grad():
            part = func(self.local.part, *rest, **kwargs)
        if part is NotImplemented:  # `p == None`: of a TypeError torch's method makes Python compare identities
            raise TypeError(f"{function_name(func)} of a tensor and {arguments_text(rest, kwargs)}")
        values = replace(self.local, part=part, expression=self._expression(func, rest, kwargs))
        differentiable = self.differentiable and func not in ALIASES and part.is_floating_point()
        return self.of(values, self, differentiable)

    def _number(self, func: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """What `func` makes of all values. Collective."""
        with torch.no_grad():
            values = replace(self.local, expression=self._expression(func, rest, kwargs))
            number = MEASURES[func](values, *rest, **by_torch_names(kwargs))
        return _without_gradient(number, self.local.name) if self.differentiable else number

    def _expression(self, func: Any, rest: Sequence[Any], named: Mapping[str, Any]) -> str:
        """The expression so far, and what is called on it, as a user writes it."""
        return f"{self.local.expression}.{function_name(func)}({arguments_text(rest, named)})"

    def _refusal(self) -> str:
        change = ", with write=True to change it" * (self.local.where_to_read == _WEIGHTS_ARE_READ)
        return (
            f"{self.terrazzo_note.name!r}, whose values are sharded over ranks. It can be measured as a whole: sum, "
            "mean, std, var, norm, min, max, any, all, count_nonzero, histc. For anything else read it "
            f"{self.local.where_to_read}{change}."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Misuse(f"pickle was called on {self._refusal()}")


def _without_gradient(number: Tensor, name: str) -> Tensor:
    """`number`, through which no backward may go where plain torch would have one."""
    if not (torch.is_grad_enabled() and number.is_floating_point()):
        return number
    made: Tensor = _NoGradient.apply(torch.zeros((), requires_grad=True, device=HOST), number, name)  # type: ignore[no-untyped-call]
    return made


class _NoGradient(torch.autograd.Function):
    """A measure that plain torch could differentiate: a loss that contains it must not lose a gradient silently."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, number: Tensor, name: str) -> Tensor:
        ctx.name = name
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise Misuse(
            f"Backward came to a measure of {ctx.name!r} that was taken while its values were sharded, which has no "
            "gradient. Compute that term inside the model's forward and return it, or use the optimizer's weight_decay."
        )


def _has_tensors(rest: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether there are tensors of more than one element, of which each rank would need its own elements."""
    return any(isinstance(each, Tensor) and each.dim() > 0 for each in (*rest, *named.values()))
