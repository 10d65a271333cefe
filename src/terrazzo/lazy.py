"""Names of a package that are imported when they are first used.

Importing a module runs the `__init__` of every package around it. A process that needs only a few modules, such as the
one that writes checkpoints, starts faster and is smaller if that does not import torch.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["lazily"]


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A `__getattr__` and a `__dir__` for `package`: of what its `__init__` imports under `if TYPE_CHECKING`.

    So each name is written once, and type checkers, editors and the rules of `tools.lint` see what is imported.
    """

    def ask(name: str) -> Any:
        home = _homes(package).get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        is_module = home == package
        value = importlib.import_module(f"{home}.{name}") if is_module else getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)  # the next one finds it without asking
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *_homes(package)})

    return ask, names


@functools.cache
def _homes(package: str) -> dict[str, str]:
    """The module that each name comes from, by the statements under the first `if` of the package's source."""
    spec = sys.modules[package].__spec__
    assert spec is not None
    source = spec.loader.get_source(package)  # type: ignore[union-attr]
    stated = next(each for each in ast.parse(source).body if isinstance(each, ast.If))
    lines = [line for line in stated.body if isinstance(line, ast.ImportFrom)]
    return {alias.name: str(line.module) for line in lines for alias in line.names}
