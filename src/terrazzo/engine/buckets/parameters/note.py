"""What the engine has noted on a parameter: how its values are reached, and which hooks are the engine's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from terrazzo.engine.runtime.private_torch import plainly

__all__ = [
    "Note",
    "has_hooks",
    "note_of",
    "register_accumulate_hook",
    "register_before_own",
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
        refuses: why no gradient may come from what is computed with it now; None where one may.
        accumulate_hook: number of the engine's hook after autograd's accumulation, which takes the gradient away.
        gradient_hook: number of its hook before the accumulation.
    """

    name: str
    split: bool = True
    reach: Callable[[], bool] | None = None
    measure: Callable[..., Any] | None = None
    arrive: Callable[[], None] | None = None
    alias: Callable[[nn.Parameter], Tensor] | None = None
    refuses: str | None = None
    accumulate_hook: int | None = None
    gradient_hook: int | None = None


def note_of(tensor: Tensor) -> Note | None:
    """Notes of the engine on a tensor; None on one that is not its own."""
    note: Note | None = vars(tensor).get("terrazzo_note")
    return note


def sharded_name(parameter: Tensor) -> str | None:
    """Name of a trainable parameter of a sharded model; None for any other tensor."""
    note = note_of(parameter) if parameter.requires_grad else None
    return None if note is None else note.name


def register_before_own(self: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
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


def successor(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Make a parameter of that value with the class, attributes and hooks of another one."""
    made = nn.Parameter(value, requires_grad=old.requires_grad)
    made.__class__ = type(old)
    vars(made).update(vars(old))
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (registered := getattr(old, hooks)) is not None:
            setattr(made, hooks, registered)  # the same dictionary: handles of users can remove them
    return made
