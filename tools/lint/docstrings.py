"""What the docstring of a package names: every module in it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tools.lint.source import Finding, Module

__all__ = ["check_module_lists"]


def check_module_lists(modules: dict[str, Module], package: str) -> Iterator[Finding]:
    """The `__init__` of a folder names each module in it whose name has no underscore in front.

    The package's own `__init__` is left out: it is the page that users read first.
    """
    inside: dict[str, list[str]] = defaultdict(list)
    for name, module in modules.items():
        if not module.is_folder and not module.path.stem.startswith("_"):
            inside[name.rpartition(".")[0]].append(module.path.stem)
    for folder, names in inside.items():
        face = modules.get(folder)
        if face is None or folder == package:
            continue
        words = set(re.findall(r"\w+", ast.get_docstring(face.tree) or ""))
        if missing := sorted(set(names) - words):
            text = f"the docstring does not say what these modules are for: {', '.join(missing)}"
            yield Finding(face.path, 1, text)
