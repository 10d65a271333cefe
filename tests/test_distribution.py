"""What is handed out: the source distribution's tests find there what they import and read."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def named_by(path: Path) -> Iterator[str]:
    """Files and folders beside `tests` that a test imports from or reads."""
    source = path.read_text(encoding="utf-8")
    yield from re.findall(r'(?:ROOT|parents\[\d\]) / "([\w.]+)', source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]


def test_the_source_distribution_has_what_its_tests_need() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = set(settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]) | {"/pyproject.toml"}
    needed = {name for path in (ROOT / "tests").rglob("*.py") for name in named_by(path) if (ROOT / name).exists()}
    assert {"tools", "benchmarks", "hostcuda", "Makefile"} <= needed
    assert {f"/{name}" for name in needed} <= included
    assert all((ROOT / name.lstrip("/")).exists() for name in included)
