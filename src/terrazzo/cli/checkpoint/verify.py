"""`terrazzo checkpoint verify`: recomputes every digest, and names what is not as it was written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.filesize import decimal

from terrazzo.checkpoint.operations import describe
from terrazzo.checkpoint.operations.audit import open_audit
from terrazzo.cli.checkpoint.progress import progress
from terrazzo.cli.shared.terminal import say, say_json
from terrazzo.errors import BadInput, Damaged
from terrazzo.processes.cpus import allowed_cpus

__all__ = ["verify_checkpoints"]

CODE_OF_STATE = {"whole": 0, "not verified": 3, "damaged": 1}
"""Exit codes. The last state in this order that a checkpoint has counts."""


def verify_checkpoints(paths: Sequence[str], threads: int | None, as_json: bool) -> int:
    """Recompute every digest and print the results; returns the exit code."""
    checkpoints = [checkpoint for path in paths for checkpoint in describe.expand(path)]
    results, start = [], time.perf_counter()
    for path in checkpoints:
        results.append(_verify(path, threads or len(allowed_cpus())))
        if not as_json:
            _say_verified(results[-1])
    seconds = time.perf_counter() - start
    size_bytes = sum(result["size_bytes"] for result in results)
    states = [state for state in CODE_OF_STATE if any(result["state"] == state for result in results)]
    if as_json:
        say_json({"checkpoints": results, "size_bytes": size_bytes, "seconds": seconds})
    else:
        counts = [f"{sum(result['state'] == state for result in results)} {state}" for state in states]
        speed = f"{decimal(size_bytes)} in {seconds:.2f} s, {size_bytes / seconds / 1e9:.2f} GB/s"
        say(f"{', '.join(counts)}: {speed}")
    return CODE_OF_STATE[states[-1]]


def _verify(path: str, threads: int) -> dict[str, Any]:
    """Verify one checkpoint; returns its entry in the report."""
    result: dict[str, Any] = {"path": path, "state": "whole", "problems": [], "size_bytes": 0}
    try:
        audit = open_audit(path)
        with progress(path.rstrip("/").rpartition("/")[2], audit.size_bytes) as advance:
            problems = audit.problems(threads, advance)
        result["size_bytes"] = audit.size_bytes
    except BadInput as error:
        problems = [error]
    if problems:
        result["state"] = "damaged" if any(isinstance(each, Damaged) for each in problems) else "not verified"
    return result | {"problems": [str(each) for each in problems]}


def _say_verified(result: dict[str, Any]) -> None:
    style = {"whole": "green", "damaged": "red"}.get(result["state"], "yellow")
    say(f"{result['state']}: {result['path']}", style)
    for problem in result["problems"]:
        say(f"  {problem}")
