"""Run all jobs on the simulated device, write the record and the report, print the report."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.allocator.jobs import JOBS, RANKS, SCALE, Job
from benchmarks.allocator.report import report
from hostcuda.build import library

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "allocator"


def measure(jobs: Sequence[Job]) -> dict[str, Any]:
    """What the rank has found. Raises: `CalledProcessError` where it fails; what it says is on the standard error."""
    library()  # built before it is waited for
    with tempfile.TemporaryDirectory(prefix="terrazzo-allocator-") as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.allocator.rank", str(rows)]
        command.append(json.dumps([asdict(job) for job in jobs]))
        subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        found = json.loads(rows.read_text())
    return {"date": str(date.today()), "torch": version("torch"), "ranks": RANKS, "scale": SCALE, "rows": found}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    record = measure(JOBS)
    (out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "report.md").write_text(report(record))
    print(report(record))


if __name__ == "__main__":
    main()
