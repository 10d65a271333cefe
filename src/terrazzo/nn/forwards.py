"""Modules that get another forward in place: the same parameters, hooks, name of the class, and `isinstance`."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["replace_forward"]


def replace_forward(module: nn.Module, forward: Any, **methods: Any) -> None:
    """Give a module another forward, and other methods, in a class of its own name."""
    kind, key = type(module), (type(module), forward)
    if (made := _MADE.get(key)) is None:
        namespace = {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": forward, **methods}
        made = _MADE[key] = type(kind.__name__, (kind,), namespace)
    module.__class__ = made


_MADE: dict[tuple[type, Any], type] = {}
"""One class for all modules of a class and a forward: units are found by classes."""
