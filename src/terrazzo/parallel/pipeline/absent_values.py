"""Stands for outputs of modules of earlier stages, whose values are on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor

from terrazzo.engine.partition.absent_parameters import Absent
from terrazzo.engine.runtime.overrides import function_name
from terrazzo.errors import Misuse

__all__ = ["AbsentValues"]


class AbsentValues(Absent):
    """The output of a module of an earlier stage that was not sent here.

    A model may change it between two modules, element by element or in place: the rank of that stage does so with the
    values, and here it stays what it is. Whatever else is computed with it raises `Misuse`.
    """

    def __getattr__(self, attribute: str) -> Any:
        return self._changed if _is_in_place(attribute) else super().__getattr__(attribute)

    def _changed(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def __setitem__(self, index: Any, values: Any) -> None:
        pass

    __iadd__ = __isub__ = __imul__ = __itruediv__ = _changed

    def _scaled(self, other: Any) -> Self:
        if isinstance(other, int | float) or (isinstance(other, Tensor) and other.dim() == 0):
            return self
        raise self.refusal("an operator")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _scaled

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], cls):
            in_place = _is_in_place(function_name(func)) or (kwargs or {}).get("inplace", False)
            if in_place or func is F.dropout:
                return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def refusal(self, what: str) -> Misuse:
        return Misuse(
            f"{what} was called on what {self.name!r} returns, which a stage before has kept: a stage is sent what the "
            "module in front of its first one returns, and nothing else. Hand it on inside of that tensor, or choose "
            "tz.Pipeline(split=[...]) that keeps all that uses it in one stage."
        )


def _is_in_place(name: str) -> bool:
    """Whether a torch operation of this name changes its tensor in place, as `mul_` does."""
    return name.endswith("_") and not name.startswith("_")
