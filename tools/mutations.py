"""Faults put in on purpose, one line each: `make test` must find every one.

    python -m tools.mutations              all of them, and a table
    python -m tools.mutations sum fsync    those with one of these words in what they break

Each is put into a copy of the tree. The tests that should find it run first, then, if they pass, all that `make test`
runs. A test that fails must pass without the fault, or it has found something else. Exits 1 if a fault survives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.faults import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]
LIMIT_S = 1800.0


class Verdict(NamedTuple):
    """`found` by which test; None where all pass. `sure` if that test passes without the fault."""

    found: str | None
    sure: bool = True


def apply(mutation: Mutation, tree: Path) -> str:
    """Put it into `tree`; the file as it was. Raises: `SystemExit` where its text is not there once."""
    path = tree / "src" / "terrazzo" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.breaks}: {text.count(mutation.old)} times in {mutation.file}: {mutation.old!r}")
    path.write_text(text.replace(mutation.old, mutation.new))
    return text


def judge(mutation: Mutation, tree: Path) -> Verdict:
    """Whether the tests find it."""
    before = apply(mutation, tree)
    found = first_failure(tree, [f"tests/{name}" for name in mutation.tests.split()], "0")
    if found is None:
        found = first_failure(tree, ["tests"], os.environ.get("JOBS", "4"))
    (tree / "src" / "terrazzo" / mutation.file).write_text(before)
    return Verdict(found, found is None or first_failure(tree, [found], "0") is None)


def first_failure(tree: Path, tests: Sequence[str], jobs: str) -> str | None:
    """The first test that fails, or `tests` where they do not come to an end; None where all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", jobs, "-m", "not gpu and not long", "-ra", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return " ".join(tests)
    if done.returncode == 0:
        return None
    return failed_in(done.stdout) or " ".join(tests)


def failed_in(summary: str) -> str | None:
    """The first test that pytest says has failed, by the name that pytest takes: workers add `@` and their group."""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?:@[^@\]]+)?(?: - |$)", summary, re.MULTILINE)
    return failed and failed[1]


def main() -> int:
    """Print a row for each, as it is judged."""
    words = sys.argv[1:]
    chosen = [each for each in MUTATIONS if not words or any(word in each.breaks for word in words)]
    survived = 0
    print("| what breaks | where | found by | s |\n|---|---|---|--:|")
    with tempfile.TemporaryDirectory(prefix="terrazzo-mutations-") as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for mutation in MUTATIONS:
            path = tree / "src" / "terrazzo" / mutation.file
            path.write_text(apply(mutation, tree))  # all are checked before the first is judged
        for mutation in chosen:
            began = time.monotonic()
            verdict = judge(mutation, tree)
            survived += verdict.found is None or not verdict.sure
            found = verdict.found or "**nothing**"
            doubt = "" if verdict.sure else " (which fails without it, too)"
            seconds = time.monotonic() - began
            print(f"| {mutation.breaks} | `{mutation.file}` | `{found}`{doubt} | {seconds:.0f} |", flush=True)
    print(f"\n{len(chosen) - survived} of {len(chosen)} found")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
