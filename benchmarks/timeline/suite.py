"""The suite `timeline` of `terrazzo bench`: runs its layouts, and keeps the record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.environment import versions
from benchmarks.timeline import report
from benchmarks.timeline.estimate import planned_s
from benchmarks.timeline.machines import GPUS, LAYOUTS, TOKENS, Cell
from benchmarks.timeline.outcome import PEERS, Outcome
from hostcuda.build import library

__all__ = ["SUITES", "cases", "markdown", "run_suite", "told", "write"]

TRAINED: dict[str, tuple[str, ...]] = {
    "host": ("replicate", "fsdp2-keep", "fsdp2", "zero0", "zero1", "zero2", "shard_grad_op", "zero3"),
    "network": ("replicate", "fsdp2-keep", "fsdp2", "zero0", "zero1", "zero2", "shard_grad_op", "zero3"),
    "hybrid": ("fsdp2-keep", "fsdp2", "hybrid_shard_zero2", "hybrid_shard"),
    "offload": ("fsdp2-offload", "zero3@cpu-all"),
}
"""By layout."""


SUITES = {"timeline": list(LAYOUTS)}


def cases(suite: str) -> list[str]:
    """Layouts of machines."""
    return SUITES[suite]


def run_suite(suite: str, chosen: Sequence[str], command: str) -> dict[str, Any]:
    """Everything simulated, for JSON. Raises: `SystemExit` with a rank's output where one fails."""
    begun = time.perf_counter()
    library()  # built before anybody waits for a rank
    outcomes = [outcome for layout in chosen for outcome in _simulated(layout)]
    return {
        "suite": suite,
        "command": command,
        "date": str(date.today()),
        "minutes": (time.perf_counter() - begun) / 60,
        "versions": versions("torch"),
        "figures": [
            {**cell.record(), **asdict(cell.figures())} for cell in dict.fromkeys(outcome.cell for outcome in outcomes)
        ],
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def markdown(record: dict[str, Any]) -> str:
    """The whole report."""
    return report.markdown(record)


def write(record: dict[str, Any], folder: Path) -> None:
    """`record.json`, `report.md` and `step-times.png` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record) + "\n")
    (folder / "report.md").write_text(markdown(record))
    report.plot(report.outcomes_of(record), folder / "step-times.png")


def _simulated(layout: str) -> Iterator[Outcome]:
    """What ranks tell of one layout, with what the planner says of it."""
    cells = [Cell(layout, gpu, tokens) for tokens in TOKENS for gpu in GPUS]
    count = len(TRAINED[layout]) * len(cells)
    for number, found in enumerate(told(_job(layout, cells)), start=1):
        outcome = Outcome(**found)
        planned = planned_s(outcome.cell, outcome.contender) if outcome.contender in PEERS else None
        print(
            f"{layout}: {number} of {count}, {outcome.contender} on {outcome.gpu}: {1e3 * outcome.step_s:.1f} ms",
            file=sys.stderr,
            flush=True,
        )
        yield Outcome(**{**found, "planned_s": planned})


def _job(layout: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """What ranks are to do."""
    mesh = {axis: size for axis, size in asdict(LAYOUTS[layout].mesh).items() if axis.startswith("dp_") and size > 1}
    return {
        "ranks": LAYOUTS[layout].ranks,
        "mesh": mesh,
        "contenders": TRAINED[layout],
        "cells": [{"cell": cell.record(), "figures": asdict(cell.figures())} for cell in cells],
    }


def told(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Line by line what the first rank prints. Raises: `SystemExit` with a rank's output where one fails."""
    with tempfile.TemporaryDirectory(prefix="terrazzo-timeline-") as folder:
        path, log = Path(folder, "job.json"), Path(folder, "log")
        path.write_text(json.dumps({**job, "store": os.path.join(folder, "store")}))
        ranks = [_started(path, rank, log) for rank in range(job["ranks"])]
        try:
            yield from map(json.loads, ranks[0].stdout or ())
            codes = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise SystemExit(f"Ranks ended with {codes}:\n{log.read_text()[-4000:]}")


def _started(job: Path, rank: int, log: Path) -> subprocess.Popen[str]:
    """A rank in an interpreter of its own, which has not imported torch yet."""
    command = [sys.executable, "-m", "benchmarks.timeline.rank", str(job), str(rank)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("a") as errors:
        out = subprocess.PIPE if rank == 0 else errors
        return subprocess.Popen(command, stdout=out, stderr=errors, env=environment, text=True)
