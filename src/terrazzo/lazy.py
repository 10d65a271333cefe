"""Names of a package that are imported when they are first used.

Importing a module runs the `__init__` of every package around it. A process that needs only a few modules, such as the
one that writes checkpoints, starts faster and is smaller if that does not import torch.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["lazily"]


def lazily(package: str, homes: Mapping[str, Iterable[str]] | None = None) -> Callable[[str], Any]:
    """A `__getattr__` for `package`.

    Args:
        homes: for each module the names to take from it; its own name stands for the module. None takes what the
            package's source imports under `if TYPE_CHECKING`, so that each name is written once.
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
    """For each name that the package imports under `if TYPE_CHECKING`, the module that it comes from."""
    spec = sys.modules[package].__spec__
    assert spec is not None
    source = spec.loader.get_source(package)  # type: ignore[union-attr]
    branches = [each for each in ast.parse(source).body if isinstance(each, ast.If)]
    statements = [line for each in branches if ast.unparse(each.test) == "TYPE_CHECKING" for line in each.body]
    imports = [line for line in statements if isinstance(line, ast.ImportFrom)]
    return {alias.name: str(line.module) for line in imports for alias in line.names}
