"""Hooks on parameters that look at gradients: those of users, and the engine's own.

Users' hooks are given a gradient in fp32 and without the loss scale of fp16, by which what they return is multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from terrazzo.engine.buckets.parameters.note import note_of
from terrazzo.engine.runtime.private_torch import plainly, will_run
from terrazzo.errors import Misuse

__all__ = [
    "ACCUMULATED_HAS_SCALE",
    "give_unscaled",
    "has_accumulate_hooks",
    "has_hooks",
    "is_accumulated",
    "register_accumulate_hook",
    "register_before_own",
    "register_gradient_hook",
    "register_unscaled",
    "successor",
]

Hook = Callable[[Tensor], Any]

ACCUMULATED_HAS_SCALE = (
    "register_post_accumulate_grad_hook under fp16: it would find the .grad multiplied by the loss scale. Use "
    "register_hook, which is given the gradient in fp32 and without the scale, or train in bf16."
)


# -- of users ------------------------------------------------------------------------------------------------------


def register_unscaled(self: nn.Parameter, hook: Hook) -> Any:
    """Register a hook in place of a parameter's own `register_hook`."""
    note = note_of(self)
    if note is not None and note.loss_scale is not None:
        hook = functools.partial(_call_unscaled, hook, note.loss_scale)
    return Tensor.register_hook(self, hook)  # type: ignore[no-untyped-call]


def register_before_own(self: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook in place of a parameter's own method: the engine's, which takes the gradient away, stays last.

    Raises:
        Misuse: under a loss scale.
    """
    note = note_of(self)
    if note is not None and note.loss_scale is not None:
        raise Misuse(f"{note.name!r} was given a hook by {ACCUMULATED_HAS_SCALE}")
    handle = Tensor.register_post_accumulate_grad_hook(self, hook)  # type: ignore[no-untyped-call]
    if note is not None and note.accumulate_hook is not None:
        with plainly():
            hooks: Any = self._post_accumulate_grad_hooks
            hooks[note.accumulate_hook] = hooks.pop(note.accumulate_hook)  # torch goes by the order of entering
    return handle


def give_unscaled(parameter: nn.Parameter, loss_scale: Callable[[], float]) -> None:
    """Gradients of a parameter are multiplied by `loss_scale` from now on, and its hooks are given them without that,
    those that have been registered before too.
    """
    note = note_of(parameter)
    assert note is not None, "a parameter of a `Unit`"
    note.loss_scale = loss_scale
    with plainly():
        hooks: Any = parameter._backward_hooks or {}
    for number, hook in hooks.items():
        if number not in note.gradient_hooks:
            hooks[number] = functools.partial(_call_unscaled, hook, loss_scale)


def _call_unscaled(hook: Hook, loss_scale: Callable[[], float], grad: Tensor) -> Any:
    """What autograd gets of a hook, which may also change in place what it is given."""
    scale = loss_scale()
    given = grad.to(torch.float32, copy=True).div_(scale)
    before = given._version
    found = hook(given)
    if found is None and given._version != before:
        found = given
    return (found * scale).to(grad.dtype) if isinstance(found, Tensor) else found


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether anybody but the engine has registered a hook that looks at gradients."""
    note = note_of(parameter)
    ours = set[int]() if note is None else note.gradient_hooks
    with plainly():
        return any(each not in ours for each in parameter._backward_hooks or ()) or has_accumulate_hooks(parameter)


def has_accumulate_hooks(parameter: nn.Parameter) -> bool:
    """Whether anybody but the engine has registered one that looks at `.grad`."""
    note = note_of(parameter)
    with plainly():
        hooks: Any = parameter._post_accumulate_grad_hooks or ()
    return any(note is None or each != note.accumulate_hook for each in hooks)


def successor(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Make a parameter of that value with the class, attributes and hooks of another one."""
    made = nn.Parameter(value, requires_grad=old.requires_grad)
    made.__class__ = type(old)
    vars(made).update(vars(old))
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (registered := getattr(old, hooks)) is not None:
            setattr(made, hooks, registered)  # the same dictionary: handles of users can remove them
    return made


# -- of the engine -------------------------------------------------------------------------------------------------


def register_accumulate_hook(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Register a hook that takes the gradient away: users' own, registered later, still run before it."""
    note = note_of(parameter)
    assert note is not None, "a parameter of a `Unit`"
    note.accumulate_hook = Tensor.register_post_accumulate_grad_hook(parameter, hook).id  # type: ignore[no-untyped-call]


def is_accumulated(parameter: Tensor) -> bool:
    """Whether the backward that is under way adds to the gradient of a parameter; `torch.autograd.grad` returns it."""
    try:
        return will_run(get_gradient_edge(parameter).node)
    except RuntimeError:
        return False


def register_gradient_hook(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Register a hook that is called with a gradient, as autograd has it, before this is accumulated."""
    note = note_of(parameter)
    assert note is not None, "a parameter of a `Unit`"
    note.gradient_hooks.add(Tensor.register_hook(parameter, hook).id)  # type: ignore[no-untyped-call]
