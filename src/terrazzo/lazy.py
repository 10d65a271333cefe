"""Names of a package that are imported when they are first asked for.

Whoever imports a module pays for the `__init__` of every package around it. A process that needs a few modules, such
as the one that writes checkpoints, is there sooner, and smaller, for not importing torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["lazily"]


def lazily(package: str, homes: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`: `homes` names modules, and of each the names in it, or its own, to be had."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def ask(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(home_of[name])
        value = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next one finds it without asking
        return value

    return ask
