"""Parsed files of a tree, what they import, and what is found in them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

__all__ = ["Finding", "Module", "below", "imports_of", "named_modules", "read_modules"]

BY_NAME = {"import_module", "__import__", "find_spec", "resolve_name", "locate", "run_module", "load_module"}


@dataclass(frozen=True)
class Finding:
    """One broken rule."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Module:
    """One parsed source file; `name` is dotted and starts with the package (`terrazzo.engine.plan.place`)."""

    path: Path
    name: str
    source: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The top-level name below the package: `engine` for `terrazzo.engine.plan.place`, "" for `terrazzo`."""
        return self.name.split(".")[1] if "." in self.name else ""

    @property
    def is_folder(self) -> bool:
        """Whether it is the `__init__` of one."""
        return self.path.name == "__init__.py"


def read_modules(root: Path) -> dict[str, Module]:
    """Every Python file below `root`, by dotted name."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        modules[name] = Module(path, name, source, ast.parse(source, filename=str(path)))
    return modules


def imports_of(module: Module, known: Mapping[str, Module]) -> Iterator[tuple[int, str]]:
    """(line, imported module) for every import of a module in `known`, those inside functions included.

    What the root's `__init__` imports only when it is asked is left out: it stands in a layer above, and itself imports
    the root.
    """
    asked = () if module.part else (node for node in module.tree.body if isinstance(node, ast.If))
    left_out = {inner for node in asked for inner in ast.walk(node)}
    for node in (node for node in ast.walk(module.tree) if node not in left_out):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                target = f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
                if target in known:
                    yield node.lineno, target


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    """The dotted name that a `from` import starts at, relative dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    climb = node.level - (1 if module.path.name == "__init__.py" else 0)
    parts = parts[: len(parts) - climb]
    return ".".join([*parts, node.module] if node.module else parts)


def named_modules(module: Module, known: Mapping[str, Module]) -> Iterator[tuple[int, str]]:
    """(line, module) for every string that names a module in `known`, where something is imported by name.

    A string may also name an attribute of the module, or begin its name, as in an f-string. What follows a "-m" is a
    program that another process runs.
    """
    nodes, programs = list(ast.walk(module.tree)), set(_programs(module.tree))
    if not any(_spelled(node) in BY_NAME for node in nodes):
        return
    for node in nodes:
        if isinstance(node, ast.Call) and _spelled(node.func) in BY_NAME and node.args:
            text = ast.unparse(node.args[0]).strip("'\"")
            yield from [(node.lineno, text)] if text.startswith(".") else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in programs:
            name = node.value.rstrip(".").partition(":")[0]
            targets = [target for target in (name, name.rpartition(".")[0]) if target in known and "." in node.value]
            yield from ((node.lineno, target) for target in targets[:1])


def _spelled(node: ast.AST) -> str | None:
    """The last word of a name, an attribute, or what a `from` import takes."""
    return getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)


def _programs(tree: ast.Module) -> Iterator[ast.expr]:
    """What follows a "-m" in a list, a tuple or the arguments of a call."""
    for node in ast.walk(tree):
        row = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.List | ast.Tuple) else []
        yield from (after for flag, after in pairwise(row) if isinstance(flag, ast.Constant) and flag.value == "-m")


def below(name: str, folder: str | None) -> bool:
    """Whether a dotted name is that of `folder`, or of what is inside of it."""
    return folder is not None and f"{name}.".startswith(f"{folder}.")
