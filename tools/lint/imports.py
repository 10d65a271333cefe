"""How modules import one another: downwards, through faces, without cycles, and by statements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tools.lint.source import Finding, Module, below, imports_of, named_modules

__all__ = ["check_imports"]

# A subpackage may import from its own layer and the layers below. "" is the package's own __init__.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "exit_codes",
        "given_numbers",
        "lazy",
        "marks",
        "messages",
        "name_globs",
        "shell_command",
        "words",
    ),
    ("documents", "files", "nn", "optim", "processes", "untrusted_files"),
    ("engine",),
    ("config", "exchange", "hosts", "parallel"),
    ("checkpoint", "dialects", "planner", "telemetry"),
    ("launch",),
    ("",),
    ("train", "integrations"),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {name: depth for depth, names in enumerate(LAYERS) for name in names}
# The same inside of some packages and folders: folders, modules that are in none as CORE, "" for `__init__`.
CORE = "(core)"
INNER_LAYERS = {
    "checkpoint": (
        *("format", "storage", CORE, "importers", "saving", "loading", "exporters"),
        *("series", "operations", ""),
    ),
    "dialects": ("core", "formats", "registry", "verbs", ""),
    "engine": (
        *("runtime", "labels", "instrumentation", "comm", "mesh", "formats", "plan", "partition", "buckets"),
        *("schedule", "autograd", "progress", "consensus", "hooks", "pipeline", "replicas", "optim", "offload"),
        *("unit_forwards", "dry_run", "model", "states", "interception", "sharding", ""),
    ),
    "engine.buckets": ("resting", "parameters", "gradients", "weights", CORE, ""),
    "engine.interception": ("measuring", "gradients", CORE, ""),
    "engine.optim": ("stock", "segments", "matrices", CORE, ""),
    "launch": (CORE, "stopping", "rank", "launcher", "script", ""),
    "planner": (
        *("caching", "model", "machine", "setup", "layout", "figures", "memory", "traffic", "timing", "gate"),
        *("report", "assemble", "choice", CORE, ""),
    ),
    "telemetry": ("log", "steps", "flight", "verdict", "display", "watchdog", "profiling", CORE, ""),
    "train": (
        *("settings", "data", "model", "checkpoints", "planning", "preflight", "session", "steps", "report"),
        *("calibration", CORE, ""),
    ),
}

# In the docstring of a package's `__init__`, above lines of modules and folders that others may import from, too.
OPEN = re.compile(r"Open to other\spackages[^:]*:\n\n((?: {4}.*\n)+)")

NAMES_MODULES = {
    "terrazzo.dialects.registry": "of eight dialects a command needs one or two; what it names counts as imported",
}
"""Modules that may import modules of their own package by a string, and why."""


def check_imports(modules: dict[str, Module]) -> Iterator[Finding]:
    """All of the rules below, of a whole package."""
    for rule in (_check_direction, _check_inside, _check_faces, _check_dialects, _check_cycles, _check_named):
        yield from rule(modules)


def _check_direction(modules: dict[str, Module]) -> Iterator[Finding]:
    """Imports point down the layers."""
    for module in modules.values():
        if module.part not in LAYER_OF:
            yield Finding(module.path, 1, f"'{module.part}' is in no layer: add it to LAYERS in {__file__}")
            continue
        for line, target in imports_of(module, modules):
            part = modules[target].part
            if part in LAYER_OF and LAYER_OF[part] > LAYER_OF[module.part]:
                text = f"'{module.part}' must not import '{target}', which lies in a layer above it"
                yield Finding(module.path, line, text)


def _check_inside(modules: dict[str, Module]) -> Iterator[Finding]:
    """Inside the packages of `INNER_LAYERS` too imports point down the layers."""
    for part, layers in INNER_LAYERS.items():
        inside = {name: module for name, module in modules.items() if below(name.partition(".")[2], part)}
        for module in inside.values():
            own_folder = _folder(module, part)
            own = f"the core of {part}" if own_folder == CORE else f"'{part.replace('.', '/')}/{own_folder}'"
            if own_folder not in layers:
                yield Finding(module.path, 1, f"{own} is in no layer: add it to INNER_LAYERS")
                continue
            for line, target in imports_of(module, inside):
                if _folder(inside[target], part) in layers[layers.index(own_folder) + 1 :]:
                    yield Finding(
                        module.path, line, f"{own} must not import '{target}', which lies in a layer above it"
                    )


def _folder(module: Module, part: str) -> str:
    """Of a module of `part`, as in `INNER_LAYERS`: `comm` for `terrazzo.engine.comm.transfer`."""
    inner, known = module.name.split(".")[2 + part.count(".") :], INNER_LAYERS[part]
    return "" if not inner else inner[0] if inner[1:] or module.is_folder or inner[0] in known else CORE


def _opened(init: Module) -> list[str]:
    """What a package's docstring opens to others: names of modules and folders below it."""
    table = OPEN.search(f"{ast.get_docstring(init.tree, clean=False)}\n")
    rows = table[1].splitlines() if table else []
    return [name for row in rows for name in re.split(" {2,}", row.strip())[0].split(", ")]


def _check_faces(modules: dict[str, Module]) -> Iterator[Finding]:
    """What a package imports of another is its `__init__`, or a module that the docstring there opens."""
    faces = {name: _opened(init) for name, init in modules.items() if name.count(".") == 1 and init.is_folder}
    for name, names in faces.items():
        for each in names:
            if f"{name}.{each}" not in modules:
                yield Finding(modules[name].path, 1, f"'{each}' is opened to other packages, and not there")
    for module in modules.values():
        for line, target in sorted(set(imports_of(module, modules))):
            package = ".".join(target.split(".")[:2])
            if package not in faces or modules[target].part == module.part:
                continue
            if target != package and not any(below(target, f"{package}.{each}") for each in faces[package]):
                text = f"'{target}' is inside of another package: import from '{package}', or open it in its docstring"
                yield Finding(module.path, line, text)


def _check_dialects(modules: dict[str, Module]) -> Iterator[Finding]:
    """No dialect imports another: what two share lies in `formats.shared`, and what carries another's document asks
    `formats.nested` for it.
    """
    formats = {name for name in modules if name.startswith("terrazzo.dialects.formats.") and name.count(".") == 3}
    folders = {name for name in formats if modules[name].is_folder and not name.endswith(".shared")}
    for name, module in modules.items():
        own = next((folder for folder in folders if below(name, folder)), None)
        for line, target in imports_of(module, modules) if own else ():
            if not below(target, own) and any(below(target, folder) for folder in folders):
                text = f"'{target}' is another dialect: move what both need to formats/shared, or ask formats.nested"
                yield Finding(module.path, line, text)


def _check_cycles(modules: dict[str, Module]) -> Iterator[Finding]:
    """No cycle between modules, and none between the top-level parts of the package."""
    lines: dict[tuple[str, str], tuple[Path, int]] = {}
    by_module: dict[str, set[str]] = {name: set() for name in modules}
    by_part: dict[str, set[str]] = {}
    for name, module in modules.items():
        hidden = named_modules(module, modules) if name in NAMES_MODULES else ()
        for line, target in (*imports_of(module, modules), *hidden):
            if target != name:
                by_module[name].add(target)
                lines.setdefault((name, target), (module.path, line))
            part = modules[target].part
            if part != module.part:
                by_part.setdefault(module.part, set()).add(part)
                lines.setdefault((module.part, part), (module.path, line))
    for graph in (by_module, by_part):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle: list[str] = error.args[1]
            # graphlib lists a cycle from the imported to the importing side.
            path, line = lines[cycle[1], cycle[0]]
            yield Finding(path, line, f"import cycle: {' -> '.join(name or '(root)' for name in reversed(cycle))}")


def _check_named(modules: dict[str, Module]) -> Iterator[Finding]:
    """Modules of the package are imported by statements: a string hides its import from the rules on imports."""
    for name, module in modules.items():
        for line, target in () if name in NAMES_MODULES else named_modules(module, modules):
            text = f"the string names '{target}' for import: write an import, or a reason into NAMES_MODULES"
            yield Finding(module.path, line, text)
