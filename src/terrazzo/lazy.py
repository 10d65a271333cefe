"""Names of a package that are imported when they are first asked for.

Whoever imports a module pays for the `__init__` of every package around it. A process that needs a few modules, such
as the one that writes checkpoints, is there sooner, and smaller, for not importing torch.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["lazily"]


def lazily(package: str, homes: Mapping[str, Iterable[str]] | None = None) -> Callable[[str], Any]:
    """The `__getattr__` of `package`.

    Args:
        homes: modules, and of each the names in it, or its own, to be had; None for what the source of the package
            imports `if TYPE_CHECKING`, so that each name stands there once.
    """
    home_of = _stated(package) if homes is None else {name: home for home, names in homes.items() for name in names}

    def ask(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(home_of[name])
        value = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next one finds it without asking
        return value

    return ask


def _stated(package: str) -> dict[str, str]:
    """By name, the module that the package imports it from where a type checker reads alone."""
    spec = sys.modules[package].__spec__
    assert spec is not None
    source = spec.loader.get_source(package)  # type: ignore[union-attr]
    branches = [each for each in ast.parse(source).body if isinstance(each, ast.If)]
    statements = [line for each in branches if ast.unparse(each.test) == "TYPE_CHECKING" for line in each.body]
    imports = [line for line in statements if isinstance(line, ast.ImportFrom)]
    return {alias.name: str(line.module) for line in imports for alias in line.names}
