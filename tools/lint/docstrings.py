"""What the docstring of a package names: every module in it, and on top in the order in which they import."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tools.lint.source import Finding, Module, imports_of

__all__ = ["check_map", "check_module_lists"]

# Of the package's own docstring: rows of names, and what they are for.
MAP = re.compile(r"imports from its own line and those above:\n\n((?:(?: {4}.*)?\n)+)")


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


def check_map(modules: dict[str, Module], package: str) -> Iterator[Finding]:
    """Where the package's own docstring has a map, it names each part, none before what that imports."""
    top = modules[package]
    if not (table := MAP.search(f"{ast.get_docstring(top.tree, clean=False)}\n")):
        return
    rows = [re.split(" {2,}", row.strip())[0].split(", ") for row in table[1].splitlines() if row.strip()]
    row_of = {part: row for row, parts in enumerate(rows) for part in parts}
    parts = {module.part for module in modules.values()} - {"", "__main__"}
    for part in sorted(parts ^ row_of.keys()):
        yield Finding(top.path, 1, f"the map does not name '{part}'" if part in parts else f"there is no '{part}'")
    above: dict[tuple[str, str], str] = {}
    for module in modules.values():
        for _, target in imports_of(module, modules):
            other = modules[target].part
            if row_of.get(other, -1) > row_of.get(module.part, len(rows)):
                above.setdefault((module.part, other), module.name)
    for (part, other), name in sorted(above.items()):
        yield Finding(top.path, 1, f"the map has '{part}' above '{other}', which {name} imports")
