"""Parameters that a loss may not compute with by itself, past the model's forward, as a penalty on weights does.

Where ranks have parts of a parameter, or of its gradient, such a term would be that of a part on each rank, or count
once for each of them; under fp16 its gradient would lack the loss scale: a number that is wrong, without an error. So
outside of forwards and backwards these parameters are of a class that hears what is computed with them, and refuses
gradients that come back from there. What has no backward, such as a norm that is printed, is let be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.buckets.parameters.note import note_of
from terrazzo.engine.buckets.parameters.placeholder import Placeholder
from terrazzo.engine.buckets.parameters.wanted_gradients import DIFFERENTIATE, differentiated
from terrazzo.engine.runtime.overrides import function_name, is_question
from terrazzo.engine.runtime.private_torch import graph_task, plainly, tree_map_only
from terrazzo.errors import Misuse

__all__ = ["OutsideForward", "watched"]


class OutsideForward:
    """Refuses gradients of parameters from what is computed with them between `close` and `open`.

    Those whose values are not here then are refused by their own class, and by this as their values come.

    Args:
        parameters: of a sharded model, each with what ends its error's message: what would be wrong, and what to do
            instead.
    """

    def __init__(self, parameters: Iterable[tuple[nn.Parameter, str]]) -> None:
        self._watched = [(each, note, why) for each, why in parameters if (note := note_of(each)) is not None]

    def close(self) -> None:
        for parameter, note, why in self._watched:
            if note.refuses is None:
                note.refuses = why
                if not isinstance(parameter, Placeholder):  # else it becomes that as its values come
                    parameter.__class__ = watched(type(parameter))

    def open(self) -> None:
        for parameter, note, why in self._watched:
            if note.refuses is why:
                note.refuses = None
                if isinstance(parameter, _Watched):
                    parameter.__class__ = parameter.inside

    @contextmanager
    def closed(self) -> Iterator[None]:
        self.close()
        try:
            yield
        finally:
            self.open()


class _Watched(nn.Parameter):
    """A parameter outside of forwards and backwards; `inside`: its class in them."""

    inside: Any

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in DIFFERENTIATE and (found := differentiated(func, args, kwargs)) is not NotImplemented:
            return found
        with plainly():
            computes = graph_task() == -1 and not is_question(func) and func is not Tensor.backward
            if computes and torch.is_grad_enabled():
                args, kwargs = tree_map_only(_Watched, functools.partial(_alias, function_name(func)), (args, kwargs))
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        made: Any = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        made.__class__ = self.inside
        return made  # type: ignore[no-any-return]


@functools.cache
def watched(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Class of a parameter of class `kind` that hears what is computed with it."""
    return type(kind.__name__, (_Watched, kind), {"inside": kind, "__module__": kind.__module__})


def _alias(function: str, parameter: _Watched) -> Tensor:
    """The parameter as a function is given it: a gradient that comes back is refused."""
    note = note_of(parameter)
    if note is None or note.refuses is None or not parameter.requires_grad:
        return parameter
    name, why = note.name, note.refuses

    def refuse(grad: Tensor) -> None:
        raise Misuse(f"The loss is computed with {name!r} ({function}) outside of the model's forward. {why}")

    alias = parameter.view_as(parameter)
    alias.register_hook(refuse)  # type: ignore[no-untyped-call, unused-ignore]
    return alias
