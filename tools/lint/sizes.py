"""Budgets: lines of files and functions, arguments, and nothing left unfinished."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from tools.lint.source import Finding, Module

__all__ = ["check_distribution", "check_sizes"]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MEDIAN_FUNCTION_LINES = 10
P90_FUNCTION_LINES = 30
MAX_ARGUMENTS = 6
# On the line of a `def` whose signature is fixed from outside: `# structure: signature fixed by ...`
EXEMPT_ARGUMENTS = "# structure: signature fixed by"

UNFINISHED = re.compile(r"\b(TO[D]O|FIX[M]E|X{3})\b")  # brackets: not to find itself

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions_of(module: Module) -> Iterator[tuple[Function, int]]:
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
        for function, length in _functions_of(module):
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
    found = [(length, m.path, f) for m in modules.values() for f, length in _functions_of(m)]
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
