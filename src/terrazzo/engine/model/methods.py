"""Methods of a module that run as its forward does, with its weights gathered around them."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from terrazzo.errors import BadInput

__all__ = ["register_forward_method"]


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let weights be gathered around `module.name(...)`, and gradients reduced after it, as around its forward.

    For a method other than `forward` that computes with weights itself, such as `model.encode`. One that only calls
    the module, such as `generate` of transformers, needs nothing.

    Args:
        module: a sharded model, or a module inside that is a unit of its own.

    Raises:
        BadInput: where there is no such method.
    """
    if not hasattr(module, name):
        raise BadInput(f"{type(module).__name__} has no method {name!r}: name one of its own.")
    method = getattr(module, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Have `forward`, with the hooks around it, run the method in its place, once."""
        own = {"forward": module.__dict__["forward"]} if "forward" in module.__dict__ else {}

        def once(*args: Any, **kwargs: Any) -> Any:
            restore()
            return method(*args, **kwargs)

        def restore() -> None:
            module.__dict__.pop("forward", None)
            module.__dict__.update(own)

        module.__dict__["forward"] = once
        try:
            return module(*args, **kwargs)
        finally:
            restore()

    module.__dict__[name] = call
