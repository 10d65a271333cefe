"""Sums, norms and other measures of parameters at rest: each rank has a look at its part, and no weights are moved.

`parameter.norm()` is collective, and so is `parameter.isnan().any()`: what is computed from each element for itself
stays split, as a `Measured`, until something makes one number of it. Parts are summed in fp64, in rank order; of a
parameter that ranks along `tp` share, those of all of them: the number is of the whole parameter. Finished
gradients can be measured in the same ways. Ranks say what they measure before they do: numbers of two parameters,
taken in another order on each rank, would add up without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.parameter import Refusing, note_of
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.runtime.overrides import by_torch_names, function_name
from terrazzo.engine.runtime.weak import weakly
from terrazzo.errors import Misuse, RanksApart

__all__ = ["Spread", "let_measure", "measured_gradient", "measures"]


def let_measure(engine: Engine) -> None:
    """From now on, parameters can be measured while their values are split."""
    for number, bucket in enumerate(engine.buckets()):
        for index, member in enumerate(bucket.members):
            if (note := note_of(member.parameter)) is not None:
                note.measure = weakly(engine, _measure, number, index)


def _measure(engine: Engine, number: int, index: int, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What `func` makes of the parameter that it was called on; None if it is nothing that can be measured."""
    bucket = engine.buckets()[number]
    member, slot = bucket.members[index], bucket.slots[index]
    if not measures(func) or not args or args[0] is not member.parameter:
        return None
    engine.catch_up()
    part = bucket.weight.copied(slot.range, engine.axes.device).to(member.parameter.dtype)
    over = (*bucket.weight_axes, *engine.axes.cut_along(member.family))
    spread = Spread(engine.axes, over, math.prod(member.shape))
    whole = Measured.of(part, member.parameter, member.name, spread)
    whole.tracked = member.trainable and func not in _ALIASES
    return Measured._called(func, (whole, *args[1:]), named)


def measures(func: Any) -> bool:
    """Whether `func` makes a number of a tensor, or something for each element that a number can be made of."""
    return func in _ELEMENTWISE or func in _MEASURES


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
    part = torch.empty(0, dtype=finished.data.dtype) if part is None else part
    spread = Spread(axes, engine.sharding.contributed_over, math.prod(member.shape))
    whole = MeasuredGradient.of(part.to(axes.device), member.parameter, name, spread)
    return Measured._called(func, (whole, *rest), named)


@dataclass(frozen=True)
class Spread:
    """How ranks have parts of a parameter.

    Attributes:
        axes: of the mesh.
        over: those over which the parts are split; along others ranks have the same.
        numel: of the whole.
    """

    axes: Axes
    over: tuple[str, ...]
    numel: int

    def check(self, said: str) -> None:
        """Refuse to put together what ranks have measured of different things, or in different ways."""
        if self.axes.differing({"measure": said}, self.over):
            raise RanksApart(
                f"The ranks have not measured the same: here it is the turn of {said}, and on another rank of "
                "something else. The number is of all their parts: ask for the same ones in the same order on every "
                "rank, such as that of model.named_parameters(), which a set does not keep."
            )


class Measured(Refusing):
    """A value for each element of a parameter, of which this rank has a part.

    Attributes:
        part: 1-D.
        spread: what the others have.
        said: how it was asked for, as a user writes it.
        tracked: whether plain torch would note how it was computed, for a gradient.
        otherwise: where single elements can be read.
    """

    part: Tensor
    spread: Spread
    said: str
    tracked: bool = False
    otherwise: ClassVar[str] = "inside 'with tz.gathered(model):'"

    @classmethod
    def of(cls, part: Tensor, like: Tensor, name: str, spread: Spread) -> Self:
        made = cls.blank(like, name, part.dtype)
        made.part, made.spread, made.said = part, spread, name
        return made

    def with_part(self, part: Tensor, said: str) -> Self:
        """Another value for each element, of the same parameter."""
        made = self.of(part, self, self.terrazzo_note.name, self.spread)
        made.said = said
        return made

    def asked(self, func: Callable[..., Any], rest: Sequence[Any]) -> str:
        """This, and what is called on it with `rest`: not what a tensor holds, which the host would wait for."""
        given = ", ".join("tensor" if isinstance(each, Tensor) else repr(each) for each in rest)
        return f"{self.said}.{function_name(func)}({given})"

    @classmethod
    def _called(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        first = args[0] if args else None
        if func in _ELEMENTWISE and isinstance(first, Measured) and not _tensors(args[1:], kwargs):
            own = first
            with torch.no_grad():
                made = own.with_part(func(own.part, *args[1:], **kwargs), own.asked(func, args[1:]))
            made.tracked = own.tracked and func not in _ALIASES and made.part.is_floating_point()
            return made
        if func in _MEASURES and isinstance(first, Measured):
            with torch.no_grad():
                asked = first.with_part(first.part, first.asked(func, args[1:]))
                number = _MEASURES[func](asked, *args[1:], **by_torch_names(kwargs))
            return _ungraded(number, first.terrazzo_note.name) if first.tracked else number
        return super()._called(func, args, kwargs)

    @classmethod
    def _refusal(cls, touched: Refusing | None) -> str:
        assert touched is not None, "torch calls this for an argument of the class"
        return (
            f"{touched.terrazzo_note.name!r}, whose values are sharded over ranks. It can be measured as a whole: sum, "
            "mean, std, var, norm, min, max, any, all, count_nonzero, histc. For anything else read it "
            f"{cls.otherwise}."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Misuse(f"pickle was called on {self._refusal(self)}")

    def total(self, value: Tensor, reduce: Callable[..., Tensor] = torch.sum) -> Tensor:
        """`reduce` of the values of all parts.

        Raises:
            RanksApart: on every rank, where another one measures something else.
        """
        self.spread.check(self.said)
        return self.spread.axes.total(value, self.spread.over, reduce)

    def as_dtype(self, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A result in the dtype that torch would give it."""
        floating = self.part.dtype if self.part.is_floating_point() else torch.float32
        return value.to(floating if dtype is None else dtype)


class MeasuredGradient(Measured):
    """A value for each element of a gradient: of its sum over ranks, which none of them has as a whole."""

    otherwise = "before ranks sum it, in a function that parameter.register_hook calls"


def _ungraded(number: Tensor, name: str) -> Tensor:
    if not (torch.is_grad_enabled() and number.is_floating_point()):
        return number
    made: Tensor = _Ungraded.apply(torch.zeros((), requires_grad=True), number, name)  # type: ignore[no-untyped-call]
    return made


class _Ungraded(torch.autograd.Function):
    """A measure that plain torch could differentiate: a loss that has it must not lose its gradient without a word."""

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


def _tensors(rest: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether there are tensors of more than one element, of which each rank would need other ones."""
    return any(isinstance(each, Tensor) and each.dim() > 0 for each in (*rest, *named.values()))


def _refuse(name: str, value: Measured, **given: Any) -> None:
    """Refuse a measure along a dimension, or in a way that only torch knows.

    Raises:
        Misuse: there.
    """
    asked = ", ".join(f"{key}={each!r}" for key, each in given.items() if each is not None and each is not False)
    if asked:
        raise Misuse(
            f"{name}({asked}) of {value.terrazzo_note.name!r}, whose values are sharded over ranks: it can be measured "
            f"as a whole, by {name}() alone. Take single rows {value.otherwise}."
        )


def _sum(
    value: Measured, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **others: Any
) -> Tensor:
    _refuse("sum", value, dim=dim, keepdim=keepdim, **others)
    if not value.part.is_floating_point():
        return value.total(value.part.sum(dtype=dtype))
    return value.as_dtype(value.total(value.part.sum(dtype=torch.float64)), dtype)


def _mean(
    value: Measured, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **others: Any
) -> Tensor:
    _refuse("mean", value, dim=dim, keepdim=keepdim, **others)
    return value.as_dtype(value.total(value.part.sum(dtype=torch.float64)) / value.spread.numel, dtype)


def _var(value: Measured, *rest: Any, **named: Any) -> Tensor:
    return _squared_deviation("var", value, *rest, **named)


def _std(value: Measured, *rest: Any, **named: Any) -> Tensor:
    wide = value.with_part(value.part.double(), value.said)
    return _squared_deviation("std", wide, *rest, **named).sqrt().to(value.as_dtype(torch.empty(0)).dtype)


def _squared_deviation(
    name: str, value: Measured, dim: Any = None, unbiased: bool = True, keepdim: bool = False, **others: Any
) -> Tensor:
    unbiased = dim if isinstance(dim, bool) else unbiased  # torch has two orders
    correction = others.pop("correction", None)
    correction = float(unbiased) if correction is None else correction
    _refuse(name, value, dim=None if isinstance(dim, bool) else dim, keepdim=keepdim, **others)
    part, numel = value.part.double(), value.spread.numel
    mean = value.total(part.sum()) / numel
    return value.as_dtype(value.total((part - mean).square().sum()) / max(numel - correction, 0))


def _norm(
    value: Measured,
    p: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    **others: Any,
) -> Tensor:
    kind = others.pop("ord", p)
    kind = 2.0 if kind in (None, "fro") else kind
    _refuse("norm", value, dim=dim, keepdim=keepdim, ord=kind if isinstance(kind, str) else None, **others)
    part, kind = value.part.double().abs(), float(kind)
    if math.isinf(kind):
        return value.as_dtype(_extreme(value, part, highest=kind > 0), dtype)
    if kind == 0:
        return value.as_dtype(value.total(part.count_nonzero()), dtype)
    return value.as_dtype(value.total((part**kind).sum()) ** (1 / kind), dtype)


def _matrix_norm(value: Measured, ord: Any = None, *rest: Any, **named: Any) -> Tensor:
    """The norm that `torch.linalg.norm` takes, where it is one of all elements: with `ord` it is of rows or columns."""
    if value.dim() != 1 and ord not in (None, "fro"):
        raise Misuse(
            f"torch.linalg.norm(ord={ord!r}) of {value.terrazzo_note.name!r}, whose values are sharded over ranks, is "
            f"no norm of all elements: take torch.linalg.vector_norm, or that of the matrix {value.otherwise}."
        )
    return _norm(value, ord, *rest, **named)


def _extreme(value: Measured, part: Tensor, *, highest: bool) -> Tensor:
    """The highest or lowest value of all parts; this rank's may be empty."""
    reduce = torch.amax if highest else torch.amin
    wide = part.double() if part.is_floating_point() else part.long()
    limits = torch.finfo(torch.float64) if part.is_floating_point() else torch.iinfo(torch.int64)
    none = -math.inf if part.is_floating_point() and highest else limits.min if highest else limits.max
    none = math.inf if part.is_floating_point() and not highest else none
    own = reduce(wide) if part.numel() else torch.full((), none, dtype=wide.dtype, device=part.device)
    return value.total(own, reduce)


def _max(value: Measured, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor:
    _refuse("max", value, dim=dim, keepdim=keepdim, **others)
    return _extreme(value, value.part, highest=True).to(value.part.dtype)


def _min(value: Measured, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor:
    _refuse("min", value, dim=dim, keepdim=keepdim, **others)
    return _extreme(value, value.part, highest=False).to(value.part.dtype)


def _any(value: Measured, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor:
    _refuse("any", value, dim=dim, keepdim=keepdim, **others)
    return value.total(value.part.any().long(), torch.amax).bool()


def _all(value: Measured, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor:
    _refuse("all", value, dim=dim, keepdim=keepdim, **others)
    return value.total(value.part.all().long(), torch.amin).bool()


def _count(value: Measured, dim: Any = None, **others: Any) -> Tensor:
    _refuse("count_nonzero", value, dim=dim, **others)
    return value.total(value.part.count_nonzero())


def _histc(value: Measured, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    low, high = (min, max) if min != max else (_min(value).item(), _max(value).item())  # as torch does
    own = torch.histc(value.part if value.part.dtype == torch.float64 else value.part.float(), bins, low, high)
    return value.total(own).to(value.part.dtype)


def _named(*names: str) -> list[Any]:
    """What torch calls under these names, as functions and as methods."""
    found = [getattr(place, name, None) for name in names for place in (torch, Tensor, torch.linalg)]
    return [each for each in found if each is not None]


_ELEMENTWISE = frozenset(
    [
        *_named(
            "abs", "isnan", "isinf", "isfinite", "square", "pow", "sqrt", "log", "sign", "float", "double", "detach"
        ),
        *_named("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "__abs__", "__eq__", "__ne__", "__lt__", "__le__"),
        *_named("__gt__", "__ge__", "__pow__", "__invert__", "absolute"),
        Tensor.data.__get__,  # type: ignore[attr-defined]
    ]
)
_ALIASES = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
"""What comes of them has no gradient in plain torch either."""
_MEASURES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_named("sum"), _sum),
    **dict.fromkeys(_named("mean"), _mean),
    **dict.fromkeys(_named("var"), _var),
    **dict.fromkeys(_named("std"), _std),
    **dict.fromkeys(_named("norm", "vector_norm"), _norm),
    torch.linalg.norm: _matrix_norm,
    **dict.fromkeys(_named("max", "amax"), _max),
    **dict.fromkeys(_named("min", "amin"), _min),
    **dict.fromkeys(_named("any"), _any),
    **dict.fromkeys(_named("all"), _all),
    **dict.fromkeys(_named("count_nonzero"), _count),
    **dict.fromkeys(_named("histc"), _histc),
}
