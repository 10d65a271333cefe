"""Measures of tensors that ranks hold in parts: sums, norms, extremes and the like.

Each measure makes a number of this rank's part, and combines the numbers of all parts. Sums run in fp64, in rank order.
Ranks first compare what they measure: the numbers of two tensors would add up without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine.labels.label import labelled, measuring
from terrazzo.engine.mesh.axes import Axes
from terrazzo.errors import Misuse

__all__ = ["ALIASES", "ELEMENTWISE", "MEASURES", "SplitValues", "Spread", "can_be_measured", "order_of_norm"]


def can_be_measured(func: Any) -> bool:
    """Whether `func` makes a number of a tensor, or one value for each element, of which a number can be made."""
    return func in ELEMENTWISE or func in MEASURES


@dataclass(frozen=True)
class Spread:
    """How a tensor is split over ranks.

    Attributes:
        axes: of the mesh.
        over: the axes over which it is split; ranks along the others hold the same, and measure it too.
        numel: elements of the whole.
    """

    axes: Axes
    over: tuple[str, ...]
    numel: int

    def check(self, expression: str) -> None:
        """Refuse to combine numbers of different measures. Collective.

        Args:
            expression: what this rank measures, as a user writes it.

        Raises:
            RanksApart: on every rank of the stage, where one of them measures something else: also in replicas that
                agree. Of a tensor that is whole on each rank nothing is compared.
        """
        if not self.axes.live(self.over):
            return
        with labelled(measuring(expression)):
            self.axes.meet(self.axes.within_stage)


@dataclass(frozen=True)
class SplitValues:
    """This rank's part of a tensor that is to be measured.

    Attributes:
        name: what errors call the tensor.
        expression: what is measured, as a user writes it.
        ndim: of the whole tensor.
        part: 1-D.
        where_to_read: where single elements can be read, for errors.
    """

    name: str
    expression: str
    ndim: int
    part: Tensor
    spread: Spread
    where_to_read: str

    def total(self, value: Tensor, reduce: Callable[..., Tensor] = torch.sum) -> Tensor:
        """`reduce` of the values of all parts. Collective.

        Raises:
            RanksApart: as of `Spread.check`.
        """
        self.spread.check(self.expression)
        with labelled(measuring(self.expression)):
            return self.spread.axes.total(value, self.spread.over, reduce)

    def as_dtype(self, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A result in `dtype`, or in the one that torch would give it."""
        floating = self.part.dtype if self.part.is_floating_point() else torch.float32
        return value.to(floating if dtype is None else dtype)


def _refuse(name: str, values: SplitValues, **arguments: Any) -> None:
    """Refuse a measure along a dimension, or with an argument that only torch knows.

    Raises:
        Misuse: there.
    """
    refused = ", ".join(f"{key}={each!r}" for key, each in arguments.items() if each is not None and each is not False)
    if refused:
        raise Misuse(
            f"{name}({refused}) of {values.name!r}, whose values are sharded over ranks: it can be measured "
            f"as a whole, by {name}() alone. Take single rows {values.where_to_read}."
        )


def _whole(dtype: torch.dtype | None) -> torch.dtype | None:
    """A dtype of whole numbers, which torch has no mean and no norm in; None for any other."""
    return None if dtype is None or dtype.is_floating_point else dtype


def _sum(
    values: SplitValues, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **others: Any
) -> Tensor:
    _refuse("sum", values, dim=dim, keepdim=keepdim, **others)
    if not (values.part.is_floating_point() and (dtype is None or dtype.is_floating_point)):
        total = values.total(values.part.sum(dtype=dtype))  # of floats too each element is cast before
        return total if dtype is None else total.to(dtype)
    return values.as_dtype(values.total(values.part.sum(dtype=torch.float64)), dtype)


def _mean(
    values: SplitValues, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **others: Any
) -> Tensor:
    _refuse("mean", values, dim=dim, keepdim=keepdim, dtype=_whole(dtype), **others)
    return values.as_dtype(values.total(values.part.sum(dtype=torch.float64)) / values.spread.numel, dtype)


def _var(values: SplitValues, *rest: Any, **named: Any) -> Tensor:
    return values.as_dtype(_squared_deviation("var", values, *rest, **named))


def _std(values: SplitValues, *rest: Any, **named: Any) -> Tensor:
    return values.as_dtype(_squared_deviation("std", values, *rest, **named).sqrt())


def _squared_deviation(
    name: str, values: SplitValues, dim: Any = None, unbiased: bool = True, keepdim: bool = False, **others: Any
) -> Tensor:
    """The variance, in fp64, under the `name` that errors have for what was asked."""
    unbiased = dim if isinstance(dim, bool) else unbiased  # torch has two orders
    correction = others.pop("correction", None)
    correction = float(unbiased) if correction is None else correction
    _refuse(name, values, dim=None if isinstance(dim, bool) else dim, keepdim=keepdim, **others)
    part, numel = values.part.double(), values.spread.numel
    mean = values.total(part.sum()) / numel
    return values.total((part - mean).square().sum()) / max(numel - correction, 0)


def _norm(
    values: SplitValues,
    p: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    **others: Any,
) -> Tensor:
    kind = order_of_norm(p, others)
    named = {"dim": dim, "keepdim": keepdim, "dtype": _whole(dtype), "ord": kind if isinstance(kind, str) else None}
    _refuse("norm", values, **named, **others)
    part, kind = values.part.double().abs(), float(kind)
    if math.isinf(kind):
        return values.as_dtype(_extreme(values, part, highest=kind > 0), dtype)
    if kind == 0:
        return values.as_dtype(values.total(part.count_nonzero()), dtype)
    return values.as_dtype(values.total((part**kind).sum()) ** (1 / kind), dtype)


def order_of_norm(order: Any, named: dict[str, Any]) -> Any:
    """The order of a norm, which torch's functions have in other places and call `p` or `ord`; 2 where none is said.

    Args:
        order: as it was given by place.
        named: what else was given; the order is taken out.
    """
    order = named.pop("ord", named.pop("p", order))
    return 2.0 if order in (None, "fro") else order


def _matrix_norm(values: SplitValues, ord: Any = None, *rest: Any, **named: Any) -> Tensor:
    """The norm that `torch.linalg.norm` takes, where it is one of all elements: with `ord` it is of rows or columns."""
    if values.ndim != 1 and ord not in (None, "fro"):
        raise Misuse(
            f"torch.linalg.norm(ord={ord!r}) of {values.name!r}, whose values are sharded over ranks, is "
            f"no norm of all elements: take torch.linalg.vector_norm, or that of the matrix {values.where_to_read}."
        )
    return _norm(values, ord, *rest, **named)


def _extreme(values: SplitValues, part: Tensor, *, highest: bool) -> Tensor:
    """The highest or lowest values of all parts; this rank's may be empty."""
    reduce = torch.amax if highest else torch.amin
    if part.is_floating_point():
        wide, lowest_of_all, highest_of_all = part.double(), -math.inf, math.inf
    else:
        limits = torch.iinfo(torch.int64)
        wide, lowest_of_all, highest_of_all = part.long(), limits.min, limits.max
    neutral = wide.new_full((1,), lowest_of_all if highest else highest_of_all)
    return values.total(reduce(wide if part.numel() else neutral), reduce)


def _max(values: SplitValues, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor:
    _refuse("max", values, dim=dim, keepdim=keepdim, **others)
    return _extreme(values, values.part, highest=True).to(values.part.dtype)


def _min(values: SplitValues, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor:
    _refuse("min", values, dim=dim, keepdim=keepdim, **others)
    return _extreme(values, values.part, highest=False).to(values.part.dtype)


def _any(values: SplitValues, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor:
    _refuse("any", values, dim=dim, keepdim=keepdim, **others)
    return values.total(values.part.any().long(), torch.amax).bool()


def _all(values: SplitValues, dim: Any = None, keepdim: bool = False, **others: Any) -> Tensor:
    _refuse("all", values, dim=dim, keepdim=keepdim, **others)
    return values.total(values.part.all().long(), torch.amin).bool()


def _count(values: SplitValues, dim: Any = None, **others: Any) -> Tensor:
    _refuse("count_nonzero", values, dim=dim, **others)
    return values.total(values.part.count_nonzero())


def _histc(values: SplitValues, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    low, high = (min, max) if min != max else (_min(values).item(), _max(values).item())  # as torch does
    own = torch.histc(values.part if values.part.dtype == torch.float64 else values.part.float(), bins, low, high)
    return values.total(own).to(values.part.dtype)


def _named(*names: str) -> list[Any]:
    """Torch's functions and methods of these names."""
    functions = [getattr(owner, name, None) for name in names for owner in (torch, Tensor, torch.linalg)]
    return [each for each in functions if callable(each)]  # `torch.float` is a dtype


_ELEMENTWISE = (
    "abs", "absolute", "sign", "square", "sqrt", "pow", "log", "isnan", "isinf", "isfinite", "logical_not", "float",
    "double", "detach", "eq", "ne", "lt", "le", "gt", "ge", "__abs__", "__pow__", "__invert__", "__eq__", "__ne__",
    "__lt__", "__le__", "__gt__", "__ge__",
)  # fmt: skip
ELEMENTWISE = frozenset([*_named(*_ELEMENTWISE), Tensor.data.__get__])  # type: ignore[attr-defined]
"""Functions whose result has one value for each element, which stays split as the tensor is."""
ALIASES = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
"""Functions of `ELEMENTWISE` whose result has no gradient in plain torch either."""
MEASURES: dict[Any, Callable[..., Tensor]] = {
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
