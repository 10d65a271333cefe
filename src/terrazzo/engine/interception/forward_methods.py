"""Methods of a module that run as its forward does, with its weights gathered around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from terrazzo.engine.buckets.parameters.note import note_of
from terrazzo.engine.runtime.method_replacement import MethodReplacement, function_of, replaced_of
from terrazzo.errors import BadInput
from terrazzo.marks import UNIT

__all__ = ["register_forward_method"]


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let weights be gathered around `module.name(...)`, and gradients reduced after it, as around its forward.

    For a method other than `forward` that computes with weights itself, such as `model.encode`. One that only calls
    the module, such as `generate` of transformers, needs nothing.

    Once is enough, and twice is the same.

    Args:
        module: a sharded model, or a module inside that is a unit of its own.

    Raises:
        BadInput: where there is no such method, for `forward` itself, and for a module of a sharded model that is no
            unit, and has weights that are gathered with those around it.
    """
    kind = type(module).__name__
    method = getattr(module, name, None) if isinstance(name, str) else None
    if not callable(method):
        raise BadInput(f"{kind} has no method {name!r}: name one of its own.")
    if name in ("forward", "__call__"):
        raise BadInput(
            f"register_forward_method: {name!r} is what weights are gathered around in any case, if {kind} is called "
            "as model(...) and not as model.forward(...). Remove this line, or name another method."
        )
    if (name_of_weight := _gathered_around(module)) is not None:
        raise BadInput(
            f"register_forward_method: {kind} is no unit of the sharded model, whose {name_of_weight!r} is gathered "
            "with what is around it. Register a method of a module that is, or of the model; or name this class in "
            "units."
        )
    if not isinstance(method, _AsForward):
        module.__dict__[name] = _AsForward(module, name, replaced_of(module, name))


def _gathered_around(module: nn.Module) -> str | None:
    """Name of a weight in a module that a unit around it gathers; None without one."""
    if UNIT.find(module) is not None:
        return None
    for parameter in module._parameters.values():
        if parameter is not None and (note := note_of(parameter)) is not None:
            return note.name
    inside = (_gathered_around(child) for child in module.children())
    return next((name for name in inside if name is not None), None)


class _AsForward(MethodReplacement):
    """A method that runs in place of its module's forward, without layers that are around that one."""

    def __init__(self, module: nn.Module, name: str, replaced: Callable[..., Any] | None) -> None:
        functools.update_wrapper(self, function_of(module, name, replaced))
        super().__init__(module, name, replaced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Have `forward`, with the hooks around it, run the method in its place, once."""
        module = self.module
        own = {"forward": module.__dict__["forward"]} if "forward" in module.__dict__ else {}

        def once(*args: Any, **kwargs: Any) -> Any:
            restore()
            return self.bound()(*args, **kwargs)

        def restore() -> None:
            module.__dict__.pop("forward", None)
            module.__dict__.update(own)

        module.__dict__["forward"] = once
        try:
            return module(*args, **kwargs)
        finally:
            restore()

    def __reduce__(self) -> tuple[Any, ...]:
        return _AsForward, (self.module, self.name, self.replaced)
