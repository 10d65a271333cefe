"""Checks what ruff and mypy do not: how modules import one another, finalizers that may wait, and size budgets.

    python tools/lint_structure.py src/terrazzo [more folders, for the size budgets only]

Prints one `path:line: finding` per line and exits 1 when there are any.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, this file has its own folder there alone
from tools.lint_finalizers import find_waits

# A subpackage may import from its own layer and the layers below. "" is the package's own __init__.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "tether"),
    ("exchange", "files"),
    ("engine",),
    ("config",),
    ("checkpoint", "dialects", "planner", "telemetry"),
    ("",),
    ("train", "integrations"),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {name: depth for depth, names in enumerate(LAYERS) for name in names}
# The same inside the engine and the planner: folders and modules, the others of these as CORE, "" for `__init__`.
CORE = "(core)"
INNER_LAYERS = {
    "engine": ("process", "links", CORE, "optim", "offload", "paper", "model", ""),
    "planner": (
        *("formulas", "figures", "model", "machine", "setup", "memory", "traffic", "timing", "gate", "text"),
        *("assemble", "choice", "report", CORE, ""),
    ),
}

# In the docstring of a package's `__init__`, above lines of modules and folders that others may import from, too.
OPEN = re.compile(r"Open to other\spackages[^:]*:\n\n((?: {4}.*\n)+)")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MEDIAN_FUNCTION_LINES = 10
P90_FUNCTION_LINES = 30
MAX_ARGUMENTS = 6
# On the line of a `def` whose signature is fixed from outside: `# structure: signature fixed by ...`
EXEMPT_ARGUMENTS = "# structure: signature fixed by"

COLLECTIVE = re.compile(
    r"(all_gather|reduce_scatter|all_reduce|all_to_all|broadcast|scatter|gather|reduce|barrier|monitored_barrier"
    r"|send|recv|isend|irecv|batch_isend_irecv)(_single|_tensor|_into_tensor|_object|_object_list|_coalesced)?"
)
BY_NAME = {"import_module", "__import__", "find_spec", "resolve_name", "locate", "run_module", "load_module"}
NAMES_MODULES = {
    "terrazzo": "__getattr__ loads what training does not need, and what it loads imports the package",
    "terrazzo.dialects.registry": "of eight dialects a command needs one or two; what it names counts as imported",
}
"""Modules that may import modules of their own package by a string, and why."""
UNFINISHED = re.compile(r"\b(TO[D]O|FIX[M]E|X{3})\b")  # brackets: not to find itself

Function = ast.FunctionDef | ast.AsyncFunctionDef


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
    """One parsed source file; `name` is dotted and starts with the package (`terrazzo.engine.place`)."""

    path: Path
    name: str
    source: str
    tree: ast.Module

    @property
    def part(self) -> str:
        """The top-level name below the package: `engine` for `terrazzo.engine.place`, "" for `terrazzo`."""
        return self.name.split(".")[1] if "." in self.name else ""

    @property
    def folder(self) -> str:
        """Of a module of the engine or the planner, as in `INNER_LAYERS`: `links` for `terrazzo.engine.links.label`."""
        below, known = self.name.split(".")[2:], INNER_LAYERS.get(self.part, ())
        return "" if not below else below[0] if below[1:] or _is_folder(self) or below[0] in known else CORE


def read_modules(root: Path) -> dict[str, Module]:
    """Every Python file below `root`, by dotted name."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        modules[name] = Module(path, name, source, ast.parse(source, filename=str(path)))
    return modules


def imports_of(module: Module, known: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """(line, imported module) for every import of a module in `known`, those inside functions included."""
    for node in ast.walk(module.tree):
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


def named_modules(module: Module, known: dict[str, Module]) -> Iterator[tuple[int, str]]:
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


def check_named(modules: dict[str, Module]) -> Iterator[Finding]:
    """Modules of the package are imported by statements: a string hides its import from the rules on imports."""
    for name, module in modules.items():
        for line, target in () if name in NAMES_MODULES else named_modules(module, modules):
            text = f"the string names '{target}' for import: write an import, or a reason into NAMES_MODULES"
            yield Finding(module.path, line, text)


def check_direction(modules: dict[str, Module]) -> Iterator[Finding]:
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


def opened(init: Module) -> list[str]:
    """What a package's docstring opens to others: names of modules and folders below it."""
    table = OPEN.search(f"{ast.get_docstring(init.tree, clean=False)}\n")
    rows = table[1].splitlines() if table else []
    return [name for row in rows for name in re.split(" {2,}", row.strip())[0].split(", ")]


def check_faces(modules: dict[str, Module]) -> Iterator[Finding]:
    """What a package imports of another is its `__init__`, or a module that the docstring there opens."""
    faces = {name: opened(init) for name, init in modules.items() if name.count(".") == 1 and _is_folder(init)}
    for name, names in faces.items():
        for each in names:
            if f"{name}.{each}" not in modules:
                yield Finding(modules[name].path, 1, f"'{each}' is opened to other packages, and not there")
    for module in modules.values():
        for line, target in sorted(set(imports_of(module, modules))):
            package = ".".join(target.split(".")[:2])
            if package not in faces or modules[target].part == module.part:
                continue
            if target != package and not any(_below(target, f"{package}.{each}") for each in faces[package]):
                text = f"'{target}' is inside of another package: import from '{package}', or open it in its docstring"
                yield Finding(module.path, line, text)


def _below(name: str, folder: str | None) -> bool:
    return folder is not None and f"{name}.".startswith(f"{folder}.")


def _is_folder(module: Module) -> bool:
    return module.path.name == "__init__.py"


def check_inside(modules: dict[str, Module]) -> Iterator[Finding]:
    """Inside the engine and the planner too imports point down the layers."""
    for part, layers in INNER_LAYERS.items():
        inside = {name: module for name, module in modules.items() if module.part == part}
        for module in inside.values():
            own = f"the {part}'s core" if module.folder == CORE else f"'{part}/{module.folder}'"
            if module.folder not in layers:
                yield Finding(module.path, 1, f"{own} is in no layer: add it to INNER_LAYERS")
                continue
            for line, target in imports_of(module, inside):
                if inside[target].folder in layers[layers.index(module.folder) + 1 :]:
                    yield Finding(
                        module.path, line, f"{own} must not import '{target}', which lies in a layer above it"
                    )


def check_names(modules: dict[str, Module]) -> Iterator[Finding]:
    """Inside the engine no name means two classes."""
    defined: dict[str, str] = {}
    for name, module in modules.items():
        for node in module.tree.body if module.part == "engine" else ():
            if isinstance(node, ast.ClassDef) and defined.setdefault(node.name, name) != name:
                yield Finding(module.path, node.lineno, f"'{node.name}' is also a class of '{defined[node.name]}'")


def check_dialects(modules: dict[str, Module]) -> Iterator[Finding]:
    """No dialect imports another: what two share lies beside their folders, and what carries another's document asks
    `dialects.nested` for it.
    """
    folders = {name for name, module in modules.items() if module.part == "dialects" and name.count(".") == 2}
    folders = {name for name in folders if _is_folder(modules[name])}
    for name, module in modules.items():
        own = next((folder for folder in folders if _below(name, folder)), None)
        for line, target in imports_of(module, modules) if own else ():
            if not _below(target, own) and any(_below(target, folder) for folder in folders):
                text = f"'{target}' is another dialect: move what both need beside the folders, or ask dialects.nested"
                yield Finding(module.path, line, text)


def check_cycles(modules: dict[str, Module]) -> Iterator[Finding]:
    """No cycle between modules, and none between the top-level parts of the package."""
    lines: dict[tuple[str, str], tuple[Path, int]] = {}
    by_module: dict[str, set[str]] = {name: set() for name in modules}
    by_part: dict[str, set[str]] = {}
    for name, module in modules.items():
        hidden = named_modules(module, modules) if module.part and name in NAMES_MODULES else ()
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


def check_collectives(modules: dict[str, Module], package: str) -> Iterator[Finding]:
    """Inside the engine, only `collectives` calls torch.distributed's collectives."""
    for module in modules.values():
        if module.part != "engine" or module.name == f"{package}.engine.links.collectives":
            continue
        for line, name in _collective_uses(module.tree):
            text = f"'{name}' is called outside engine/links/collectives.py, which alone accounts for traffic"
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


def functions_of(module: Module) -> Iterator[tuple[Function, int]]:
    """Every function with the lines its body takes, docstring left out."""
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            yield node, (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def check_sizes(modules: dict[str, Module]) -> Iterator[Finding]:
    """Lengths of files and functions, numbers of arguments, and nothing left unfinished."""
    for module in modules.values():
        lines = module.source.splitlines()
        if len(lines) > MAX_FILE_LINES:
            yield Finding(module.path, len(lines), f"file of {len(lines)} lines (limit {MAX_FILE_LINES})")
        for number, text in enumerate(lines, 1):
            if UNFINISHED.search(text):
                yield Finding(module.path, number, f"unfinished work: {text.strip()}")
        for function, length in functions_of(module):
            if length > MAX_FUNCTION_LINES:
                text = f"{function.name}: body of {length} lines (limit {MAX_FUNCTION_LINES})"
                yield Finding(module.path, function.lineno, text)
            count = _argument_count(function)
            if count > MAX_ARGUMENTS and EXEMPT_ARGUMENTS not in lines[function.lineno - 1]:
                text = f"{function.name}: {count} arguments (limit {MAX_ARGUMENTS}; pass a config object)"
                yield Finding(module.path, function.lineno, text)


def _argument_count(function: Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    bound = bool(named) and named[0].arg in ("self", "cls")
    return len(named) - bound + (arguments.vararg is not None) + (arguments.kwarg is not None)


def check_distribution(root: Path, modules: dict[str, Module]) -> Iterator[Finding]:
    """The median and the 90th percentile of all function lengths below one root."""
    found = [(length, m.path, f) for m in modules.values() for f, length in functions_of(m)]
    if len(found) < 10:
        return
    lengths = [length for length, _, _ in found]
    median, p90 = statistics.median(lengths), statistics.quantiles(lengths, n=10)[-1]
    if median > MEDIAN_FUNCTION_LINES:
        yield Finding(root, 0, f"median function body of {median:g} lines (limit {MEDIAN_FUNCTION_LINES})")
    if p90 > P90_FUNCTION_LINES:
        yield Finding(root, 0, f"90th percentile of function bodies is {p90:g} lines (limit {P90_FUNCTION_LINES})")
        for length, path, function in sorted(found, key=lambda item: -item[0]):
            if length > P90_FUNCTION_LINES:
                yield Finding(path, function.lineno, f"{function.name}: {length} lines, one of the longest")


def check(root: Path, *, layered: bool) -> list[Finding]:
    """All findings below `root`; the rules about imports apply only to a `layered` package."""
    modules = read_modules(root)
    findings = [*check_sizes(modules), *check_distribution(root, modules)]
    if layered:
        findings += [
            *check_direction(modules),
            *check_inside(modules),
            *check_names(modules),
            *check_faces(modules),
            *check_dialects(modules),
            *check_cycles(modules),
            *check_collectives(modules, root.name),
            *(Finding(found.path, found.line, found.text) for found in find_waits(modules)),
            *check_named(modules),
        ]
    return findings


def main(arguments: list[str]) -> int:
    """Check every root named; the first is the layered package."""
    roots = [Path(argument) for argument in arguments]
    if not roots or not all(root.is_dir() for root in roots):
        print(f"usage: lint_structure.py PACKAGE_FOLDER [FOLDER ...]; got {arguments}", file=sys.stderr)
        return 2
    findings = [finding for i, root in enumerate(roots) for finding in check(root, layered=i == 0)]
    for finding in findings:
        print(finding)
    print(f"structure: {len(findings)} findings in {', '.join(arguments)}", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
