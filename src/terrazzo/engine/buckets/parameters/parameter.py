"""Stand-ins for parameters while their values are split over ranks.

Its class becomes `AtRest`: questions about shape, dtype, device or flags are answered as always, and anything that
would touch the values raises `Misuse` with the parameter's name. The object stays the same one throughout, so ties,
hooks and the user's own references stay valid; only its class and its memory come and go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from terrazzo.engine.runtime.callers import calling_module
from terrazzo.engine.runtime.compiled import is_of_compiler
from terrazzo.engine.runtime.overrides import HARMLESS, arguments, function_name
from terrazzo.engine.runtime.private_torch import as_class, plainly, tensor_data
from terrazzo.errors import Misuse

__all__ = [
    "Arriving",
    "AtRest",
    "Guard",
    "Note",
    "Placeholder",
    "StateIn8Bits",
    "StateOnNvme",
    "StatePlaceholder",
    "Zeros",
    "has_hooks",
    "note_of",
    "plain_data",
    "register_accumulate_hook",
    "register_gradient_hook",
    "sharded_name",
    "successor",
]


@dataclass(eq=False)
class Note:
    """Notes of the engine on a parameter, or on what stands in for one: its one attribute there.

    Attributes:
        name: what errors call it.
        split: whether its values are split over ranks; else they are only out of reach while they are updated.
        reach: gathers the values if the model's forward runs; returns whether they are on this rank.
        measure: what a function makes of the values while they are split; None where it makes nothing.
        arrive: waits for new values that are on their way.
        alias: what `.data` gives, in place of torch's own.
        accumulate_hook: number of the engine's hook behind autograd's accumulation, which takes the gradient away.
        gradient_hook: number of its hook before the accumulation.
    """

    name: str
    split: bool = True
    reach: Callable[[], bool] | None = None
    measure: Callable[..., Any] | None = None
    arrive: Callable[[], None] | None = None
    alias: Callable[[nn.Parameter], Tensor] | None = None
    accumulate_hook: int | None = None
    gradient_hook: int | None = None

    def reach_with(self, reach: Callable[[], bool]) -> None:
        """Have `reach` gather the values for whoever asks for them inside the model's forward."""
        self.reach = reach

    def measure_with(self, measure: Callable[..., Any]) -> None:
        """Have `measure` answer functions that make a number of the values while they are split."""
        self.measure = measure

    def arrive_with(self, arrive: Callable[[], None]) -> None:
        """Have `arrive` wait for new values, which are on their way."""
        self.arrive = arrive

    def alias_with(self, alias: Callable[[nn.Parameter], Tensor]) -> None:
        """Have `alias` give what `.data` is."""
        self.alias = alias


def note_of(tensor: Tensor) -> Note | None:
    """Notes of the engine on a tensor; None on one that is not its own."""
    note: Note | None = vars(tensor).get("terrazzo_note")
    return note


def _register_before_ours(self: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook in place of a parameter's own method: the engine's, which takes the gradient away, stays last."""
    handle = Tensor.register_post_accumulate_grad_hook(self, hook)  # type: ignore[no-untyped-call]
    if (note := note_of(self)) is not None and note.accumulate_hook is not None:
        with plainly():
            hooks: Any = self._post_accumulate_grad_hooks
            hooks[note.accumulate_hook] = hooks.pop(note.accumulate_hook)  # torch goes by the order of entering
    return handle


def register_accumulate_hook(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Register a hook that takes the gradient away: users' own, registered later, still run before it."""
    note = note_of(parameter)
    assert note is not None, "a parameter of a bucket that has been built"
    note.accumulate_hook = Tensor.register_post_accumulate_grad_hook(parameter, hook).id  # type: ignore[no-untyped-call]


def register_gradient_hook(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Register a hook that is called with a gradient before autograd accumulates it."""
    note = note_of(parameter)
    assert note is not None, "a parameter of a bucket that has been built"
    note.gradient_hook = parameter.register_hook(hook).id


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether anybody but the engine has registered a hook that looks at gradients."""
    note = note_of(parameter)
    ours = () if note is None else (note.accumulate_hook, note.gradient_hook)
    with plainly():
        hooks: Any = [*(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())]
    return any(each not in ours for each in hooks)


class Placeholder(nn.Parameter):
    """Stand-in with the shape, dtype and device of a tensor, and without its values.

    Torch answers questions about these, `_answer` what else can be done, and for the rest `Misuse` is raised.
    """

    terrazzo_note: Note
    register_post_accumulate_grad_hook = _register_before_ours

    @classmethod
    def blank(cls, like: Tensor, name: str, dtype: torch.dtype | None = None) -> Self:
        """Make one of the shape and device of `like`, and its dtype unless given, in the memory of one element."""
        with plainly():
            one = torch.zeros((), dtype=like.dtype if dtype is None else dtype, device=like.device)
            made: Self = as_class(cls, one.expand(like.shape), False)
        made.terrazzo_note = Note(name)
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in HARMLESS:
            with plainly():
                return func(*args, **kwargs)
        touched = next((arg for arg in arguments(args, kwargs) if isinstance(arg, cls)), None)
        if touched is None:
            raise Misuse(
                f"{function_name(func)} was given a sharded tensor inside of a list in a list, which is not "
                "supported. Pass the tensor itself or one list, or call it inside 'with tz.gathered(model):'."
            )
        if (answer := touched._answer(func, args, kwargs)) is not NotImplemented:
            return answer
        raise Misuse(f"{function_name(func)} was called on {touched._refusal()}")

    def _answer(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what comes of a function that would touch the values; `NotImplemented` where it is refused.

        Args:
            args: this is the first placeholder of its class among them.
        """
        if func in (Tensor.__repr__, Tensor.__format__):
            return f"Parameter(sharded, shape={tuple(self.shape)}, dtype={self.dtype})"
        return NotImplemented

    def _refusal(self) -> str:
        """Say what this is, why it cannot be touched, and what to do instead."""
        raise NotImplementedError


class AtRest(Placeholder):
    """A parameter whose values are not on this rank now."""

    def _answer(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if (text := super()._answer(func, args, kwargs)) is not NotImplemented:
            return text
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
                f"{name!r}, which is being updated in the background until its unit's next forward. Read or write it "
                "inside 'with tz.gathered(model):', or use tz.Offload(step='synchronous')."
            )
        return (
            f"{name!r}, whose values are sharded over ranks: outside its unit's forward and backward they are not on "
            "this rank. Read or write them inside 'with tz.gathered(model):', or call the model itself; a method of "
            "its own that computes with weights needs tz.register_forward_method(model, 'name') once."
        )


class Zeros(Placeholder):
    """Result of `torch.zeros_like` of a parameter at rest: a gradient for a first step that is to change nothing.

    It has the memory of one element, since a full tensor of each parameter would be the whole model on each rank.
    """

    def _refusal(self) -> str:
        return (
            f"zeros_like({self.terrazzo_note.name!r}), which stands in for a full tensor on every rank, since that "
            "parameter is sharded. If you want one, write torch.zeros(p.shape, dtype=p.dtype, device=p.device)."
        )


class StatePlaceholder(Placeholder):
    """Stand-in in `optimizer.state` for a state per element that rests elsewhere: on `meta`, without memory."""

    @classmethod
    def of(cls, numel: int, dtype: torch.dtype, key: str) -> Self:
        """Make one for a segment of `numel` elements, under the optimizer's own `key`."""
        return cls.blank(torch.empty(numel, dtype=dtype, device="meta"), key)


class StateOnNvme(StatePlaceholder):
    """Stand-in for a state that rests on `nvme`."""

    def _refusal(self) -> str:
        return (
            f"{self.terrazzo_note.name!r}, which the optimizer keeps on nvme: it cannot be read or "
            "changed by hand. Place it in host memory, as plan 'zero3@cpu' does, or load a checkpoint without "
            "the optimizer's state to begin anew."
        )


class StateIn8Bits(StatePlaceholder):
    """Stand-in for a state that rests in blocks of 8-bit codes."""

    def _refusal(self) -> str:
        return (
            f"{self.terrazzo_note.name!r}, which the optimizer keeps in 8 bits: it cannot be read or changed by "
            "hand. Read it in optimizer.state_dict(), set it with optimizer.load_state_dict, or leave out 'moments' of "
            "the precision, which keeps it in fp32."
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


def sharded_name(parameter: Tensor) -> str | None:
    """Name of a trainable parameter of a sharded model; None for any other tensor."""
    note = note_of(parameter) if parameter.requires_grad else None
    return None if note is None else note.name


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
                note.arrive_with(arrive)

    def open(self) -> None:
        """Make the parameters ordinary ones again, of the classes they had."""
        for parameter, original in self._classes:
            parameter.__class__ = original


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
        """Show it as one of the class that it had; torch shows a subclass by other words."""
        return repr(as_class(kind, self.detach(), self.requires_grad))

    own: dict[str, Any] = {"data": property(data, set_data), "__reduce_ex__": pickled, "__repr__": text}
    own["register_post_accumulate_grad_hook"] = _register_before_ours
    return type(kind.__name__, (kind,), {**own, "__module__": kind.__module__})


def successor(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Make a parameter of that value with the class, attributes and hooks of another one."""
    made = nn.Parameter(value, requires_grad=old.requires_grad)
    made.__class__ = type(old)
    vars(made).update(vars(old))
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (registered := getattr(old, hooks)) is not None:
            setattr(made, hooks, registered)  # the same dictionary: handles of users can remove them
    return made
