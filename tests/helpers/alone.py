"""Tests that fork the process they run in need one of their own: no threads of earlier tests that hold a lock then.

A module with `pytestmark = pytest.mark.alone` runs as a whole in one fresh process, when its first test is due; each of
its tests passes or fails here as it did there.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.helpers import programs

__all__ = ["limit_of", "outcome_of", "runs_elsewhere"]

_INSIDE = "TERRAZZO_TESTS_ALONE"


def runs_elsewhere(item: pytest.Item) -> bool:
    """Whether `item` runs in a process of its module's own, and this is not it."""
    return item.get_closest_marker("alone") is not None and not os.environ.get(_INSIDE)


def limit_of(config: pytest.Config) -> float:
    """Seconds for a test that does not say otherwise."""
    return float(config.getoption("timeout") or config.getini("timeout"))


def outcome_of(item: pytest.Item) -> str | None:
    """What the test said when it failed, or None. Raises `pytest.fail` when its process gave no result."""
    results, said = _run(item.path, item.config.rootpath, item.config.getoption("markexpr"), limit_of(item.config))
    if item.name not in results:
        pytest.fail(f"{item.nodeid} gave no result in a process of its own:\n{said}", pytrace=False)
    return results[item.name]


@functools.cache
def _run(module: Path, root: Path, marks: str, limit_s: float) -> tuple[dict[str, str | None], str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-q", "-n0", "-m", marks, f"--timeout={limit_s}", f"--junitxml={report}"]
        inside = {**os.environ, _INSIDE: "1"}
        try:
            done = programs.run("-m", "pytest", *options, str(module), cwd=root, env=inside, timeout_s=limit_s - 10)
        except subprocess.TimeoutExpired as late:
            return {}, f"no end after {late.timeout:.0f} s; so far: {late.stdout!r}"
        return _read(report) if report.exists() else {}, done.stdout + done.stderr


def _read(report: Path) -> dict[str, str | None]:
    cases = ET.parse(report).iter("testcase")  # our own pytest wrote it
    return {case.attrib["name"]: _failure(case) for case in cases}


def _failure(case: ET.Element) -> str | None:
    found = [part for part in case if part.tag in ("failure", "error")]
    return (found[0].text or found[0].get("message", "")) if found else None
