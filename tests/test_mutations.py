"""The faults of `make mutations` can still be put in; whether the tests find them is for it to say."""

from __future__ import annotations

import ast

import pytest

from tools.faults import MUTATIONS, Mutation
from tools.mutations import ROOT, failed_in


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks)
def test_its_place_is_there_once_and_what_it_makes_is_python(mutation: Mutation) -> None:
    text = (ROOT / "src" / "terrazzo" / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    assert mutation.breaks.isprintable()
    ast.parse(text.replace(mutation.old, mutation.new))
    assert all((ROOT / "tests" / name).exists() for name in mutation.tests.split())


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "FAILED tests/a.py::test_it[zero3@cpu-2]@processes of a - AssertionError: 1",
            "tests/a.py::test_it[zero3@cpu-2]",
        ),
        ("FAILED tests/a.py::test_it@test_a.py", "tests/a.py::test_it"),
        ("FAILED tests/a.py::test_it[zero3@cpu] - x@y", "tests/a.py::test_it[zero3@cpu]"),
        ("ERROR tests/a.py", "tests/a.py"),
    ],
)
def test_what_failed_has_the_name_that_pytest_takes(line: str, name: str) -> None:
    assert failed_in(f"2 failed\n{line}\n3 passed") == name
