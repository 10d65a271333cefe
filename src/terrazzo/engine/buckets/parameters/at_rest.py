"""Stand-ins for parameters while their values are split over ranks.

Its class becomes `AtRest`: questions about shape, dtype, device or flags are answered as always, and anything that
would touch the values raises `Misuse` with the parameter's name. The object stays the same one throughout, so ties,
hooks and the user's own references stay valid; only its class and its memory come and go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.buckets.parameters.gradient_hooks import register_before_own, register_unscaled
from terrazzo.engine.buckets.parameters.note import Note, note_of
from terrazzo.engine.buckets.parameters.outside_forward import watched
from terrazzo.engine.buckets.parameters.placeholder import Placeholder, Zeros
from terrazzo.engine.buckets.parameters.wanted_gradients import DIFFERENTIATE, differentiated
from terrazzo.engine.runtime.callers import calling_module
from terrazzo.engine.runtime.compiled import is_of_compiler
from terrazzo.engine.runtime.overrides import arguments
from terrazzo.engine.runtime.private_torch import as_class, tensor_data

__all__ = ["Arriving", "AtRest", "Guard", "plain_data"]


class AtRest(Placeholder):
    """A parameter whose values are not on this rank now."""

    def _answer(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if (text := super()._answer(func, args, kwargs)) is not NotImplemented:
            return text
        if func in DIFFERENTIATE:
            return differentiated(func, args, kwargs)
        note = self.terrazzo_note
        if note.reach is not None and note.reach():  # inside the model's forward: it is here now
            return func(*args, **kwargs)
        measure = note.measure if note.split else None
        if measure is not None and (measured := measure(func, args, kwargs)) is not None:
            return measured
        if func is torch.zeros_like:
            return Zeros.blank(self, note.name)
        return NotImplemented

    def _refusal(self) -> str:
        name = self.terrazzo_note.name
        if not self.terrazzo_note.split:
            return (
                f"{name!r}, which is being updated in the background until its unit's next forward. Read it "
                "inside 'with tz.gathered(model):', with write=True to change it, or use "
                "tz.Offload(step='synchronous')."
            )
        return (
            f"{name!r}, whose values are sharded over ranks: outside its unit's forward and backward they are not on "
            "this rank. Read them inside 'with tz.gathered(model):', with write=True to change them, or call the model "
            "itself; a method of its own that computes with weights needs tz.register_forward_method(model, "
            "'name') once."
        )


class Arriving(AtRest):
    """A parameter whose new values are on their way, beside the computation: whatever touches it waits for them."""

    def _answer(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for parameter in [arg for arg in arguments(args, kwargs) if isinstance(arg, Arriving)]:
            arrive = parameter.terrazzo_note.arrive
            assert arrive is not None, "it would not be of this class"
            arrive()  # it is of its own class again
        if func is Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].data  # which may be watched
        return func(*args, **kwargs)


class Guard:
    """Lets the parameters of a bucket be read, or not; all at once, because it happens for every unit twice a pass.

    Args:
        notes: the parameters, and what is noted on them from now on.
    """

    def __init__(self, notes: Sequence[tuple[nn.Parameter, Note]]) -> None:
        self._notes = [note for _, note in notes]
        for parameter, note in notes:
            parameter.terrazzo_note = note  # type: ignore[attr-defined]
            parameter.__class__ = _linked(type(parameter))
        self._classes = [(parameter, type(parameter)) for parameter, _ in notes]

    def close(self, arrive: Callable[[], None] | None = None) -> None:
        """Have reading a value raise an error with the parameter's name from now on; or call `arrive`, which opens."""
        kind = AtRest if arrive is None else Arriving
        for parameter, _ in self._classes:
            parameter.__class__ = kind
        if arrive is not None:
            for note in self._notes:
                note.arrive = arrive

    def open(self) -> None:
        """Make the parameters ordinary ones again, of the classes they had; watched, where a loss may not have them."""
        for (parameter, original), note in zip(self._classes, self._notes, strict=True):
            parameter.__class__ = original if note.refuses is None else watched(original)


def plain_data(parameter: nn.Parameter) -> Tensor:
    """Tensor that torch itself gives as `parameter.data`: what is written into it leaves no trace."""
    value: Tensor = tensor_data.__get__(parameter)
    return value


@functools.cache
def _linked(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Class of a parameter of a sharded model while its values are here; `.data` is noticed."""

    def data(self: nn.Parameter) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return self.detach()  # the same to a graph, which cannot hold what follows; writing into it leaves a trace
        note, caller = note_of(self), calling_module(beyond=__name__)  # here it is what touched it while it arrived
        if note is None or note.alias is None or is_of_compiler(caller):
            return plain_data(self)
        return note.alias(self)

    def set_data(self: nn.Parameter, value: Tensor) -> None:
        tensor_data.__set__(self, value)

    def pickled(self: nn.Parameter, protocol: Any) -> Any:
        """Reduce it to an ordinary parameter, with what else users have noted on it."""
        plain = nn.Parameter(self.detach().clone(), self.requires_grad)  # alone: not all of its unit
        vars(plain).update({name: value for name, value in vars(self).items() if name != "terrazzo_note"})
        return plain.__reduce_ex__(protocol)

    def text(self: nn.Parameter) -> str:
        """Show it as one of the class that it had; torch shows a subclass in different words."""
        return repr(as_class(kind, self.detach(), self.requires_grad))

    own: dict[str, Any] = {"data": property(data, set_data), "__reduce_ex__": pickled, "__repr__": text}
    own |= {"register_hook": register_unscaled, "register_post_accumulate_grad_hook": register_before_own}
    return type(kind.__name__, (kind,), {**own, "__module__": kind.__module__})
