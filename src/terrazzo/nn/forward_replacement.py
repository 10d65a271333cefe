"""Modules that get another forward in place: the same parameters, hooks, name of the class, and `isinstance`."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["replace_forward"]


def replace_forward(module: nn.Module, forward: Any, **methods: Any) -> None:
    """Give a module another forward, and other methods, in a class of its own name. It can be pickled and copied."""
    module.__class__ = _with_forward(type(module), forward, methods)


def _with_forward(kind: type[nn.Module], forward: Any, methods: dict[str, Any]) -> type[nn.Module]:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        """No import finds this class: pickle is told what it is made of."""
        reduced: Any = kind.__reduce_ex__(self, protocol)
        return _unpickled, (kind, forward, methods), *reduced[2:]

    key = kind, forward, frozenset(methods.items())
    if (made := _MADE.get(key)) is None:
        namespace = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce_ex__": reduce}
        made = _MADE[key] = type(kind.__name__, (kind,), {**namespace, "forward": forward, **methods})
    return made


def _unpickled(kind: type[nn.Module], forward: Any, methods: dict[str, Any]) -> nn.Module:
    """A module that has no state yet."""
    made = _with_forward(kind, forward, methods)
    return made.__new__(made)


_MADE: dict[tuple[type, Any, frozenset[tuple[str, Any]]], type] = {}
"""One class for all modules of a class that get the same forward and methods: units are found by classes."""
