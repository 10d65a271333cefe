"""The page on reliability: every case is there once, and every test that it names exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
CASES = 107

ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
TEST = re.compile(r"\[([\w/.]+)::(\w+)\]\(([^)]+)\)")
ELSEWHERE = re.compile(r"not tested here: \w.+")


def rows() -> list[tuple[str, str]]:
    """The number of each case, and by what it is shown."""
    return [(number, shown_by) for number, _, _, shown_by in ROW.findall(PAGE.read_text(encoding="utf-8"))]


@functools.cache
def names_in(path: Path) -> set[str]:
    """The names of the functions of a file, without importing it."""
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_every_case_is_on_the_page_once() -> None:
    assert sorted(int(number) for number, _ in rows()) == list(range(1, CASES + 1))
    tables = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d", line)]
    assert len(tables) == CASES, "a row that is not of four columns"


@pytest.mark.parametrize(("number", "shown_by"), rows(), ids=lambda value: value[:3])
def test_a_case_is_shown_by_tests_that_exist_or_says_what_it_needs(number: str, shown_by: str) -> None:
    for part in shown_by.split("<br>"):
        if named := TEST.fullmatch(part):
            path, name, target = named.groups()
            assert (PAGE.parent / target).resolve() == ROOT / "tests" / path
            assert name.startswith("test_") and name in names_in(ROOT / "tests" / path), f"{path}::{name}"
        else:
            assert ELSEWHERE.fullmatch(part), part
