"""What may be named and called where: no two classes or modules alike, collectives in two modules, devices in one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tools.lint.source import Finding, Module

__all__ = ["check_collectives", "check_devices", "check_module_names", "check_names"]

COLLECTIVE = re.compile(
    r"(all_gather|reduce_scatter|all_reduce|all_to_all|broadcast|scatter|gather|reduce|barrier|monitored_barrier"
    r"|send|recv|isend|irecv|batch_isend_irecv)(_single|_tensor|_into_tensor|_object|_object_list|_coalesced)?"
)
TWICE = {"TerrazzoStrategy": "Lightning too has each of its strategies twice, for the Trainer and for Fabric"}
"""Names of two classes, and why."""


def check_names(modules: dict[str, Module]) -> Iterator[Finding]:
    """No name means two classes of the whole package, or a class and the alias of a type."""
    defined: dict[str, str] = {}
    for name, module in modules.items():
        classes = [node for node in module.tree.body if isinstance(node, ast.ClassDef) and node.name not in TWICE]
        for node in classes:
            if defined.setdefault(node.name, name) != name:
                yield Finding(module.path, node.lineno, f"'{node.name}' is also a class of '{defined[node.name]}'")
    for module in modules.values():
        for line, alias in _aliases(module.tree):
            if alias in defined:
                text = f"the alias '{alias}' is also a class of '{defined[alias]}'"
                yield Finding(module.path, line, text)


def _aliases(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and names of aliases of types: `Step = tuple[int, bool]`, `Units = str | Sequence[str]`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id.lstrip("_")[:1].isupper() and not target.id.isupper():
                    yield node.lineno, target.id


FOLDERS_ALIKE = {"checkpoint", "cli", "dialects", "integrations", "parallel"}
"""Packages with a folder for each format, command, library or axis: modules of one name have one part in each."""


def check_module_names(modules: dict[str, Module]) -> Iterator[Finding]:
    """In every other package no name means two modules."""
    known: dict[tuple[str, str], str] = {}
    for name, module in modules.items():
        if module.part in FOLDERS_ALIKE or module.is_folder:
            continue
        if (other := known.setdefault((module.part, module.path.stem), name)) != name:
            yield Finding(module.path, 1, f"'{module.path.stem}' is also the name of '{other}': one of them means more")


def check_devices(modules: dict[str, Module], package: str) -> Iterator[Finding]:
    """Only `engine/runtime/device.py` says `torch.cuda`: another kind of device needs one other module."""
    for module in modules.values():
        for line in _cuda_uses(module.tree) if module.name != f"{package}.engine.runtime.device" else ():
            text = "torch.cuda is named outside engine/runtime/device.py, which alone knows kinds of devices"
            yield Finding(module.path, line, text)


def _cuda_uses(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
            named = [f"{start}{alias.name}." for alias in node.names]
            if any(name.startswith("torch.cuda.") for name in named):
                yield node.lineno
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
            yield node.lineno


def check_collectives(modules: dict[str, Module], package: str) -> Iterator[Finding]:
    """Inside the engine, only two modules call torch.distributed's collectives."""
    callers = [f"{package}.engine.comm.{name}" for name in ("collectives", "control_exchanges")]
    for module in modules.values():
        if module.part != "engine" or module.name in callers:
            continue
        for line, name in _collective_uses(module.tree):
            text = (
                f"'{name}' is called outside engine/comm/collectives.py and control_exchanges.py, which account for "
                "traffic"
            )
            yield Finding(module.path, line, text)


def _collective_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    aliases = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.asname and a.name.startswith("torch.distributed")}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            yield from ((node.lineno, a.name) for a in node.names if COLLECTIVE.fullmatch(a.name))
            aliases |= {a.asname or a.name for a in node.names if "collectives" in a.name}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not COLLECTIVE.fullmatch(node.attr):
            continue
        if ast.unparse(node.value) in aliases:
            yield node.lineno, node.attr
