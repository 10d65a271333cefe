"""Which modules choose experts: their products stay precise, and what they multiply with are matrices."""

from __future__ import annotations

import re

from torch import nn

__all__ = ["is_router"]

_NAMES = ("gate", "router")
_CLASSES = re.compile(r"Router|Gate$|Gating")


def is_router(model: nn.Module, name: str) -> bool:
    """Whether the submodule `name` chooses experts: its class says so, or it is a gate or router beside `experts`."""
    parent, _, last = name.rpartition(".")
    beside_experts = last in _NAMES and hasattr(model.get_submodule(parent), "experts")
    return beside_experts or bool(_CLASSES.search(type(model.get_submodule(name)).__name__))
