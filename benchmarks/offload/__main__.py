"""Measure, write the record and the report, print the report: `python -m benchmarks.offload --help`."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.cpu.compare import progress
from benchmarks.environment import processor, versions
from benchmarks.offload import adam, drive, nvme, training
from benchmarks.offload.report import report
from terrazzo.engine.offload.nvme.swap_folder import mount_of

PARTS = ("adam", "drive", "nvme", "training")
RESULTS = Path(__file__).parents[1] / "results" / "offload"


def measure(folder: Path, parts: Sequence[str]) -> dict[str, Any]:
    """Everything of these parts, as plain numbers. `folder` is on the disk that is measured."""
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "adam": adam.measure,
        "drive": lambda: drive.measure(folder),
        "nvme": lambda: nvme.measure(folder),
        "training": lambda: training.measure(folder),
    }
    found = {}
    for part in parts:
        progress(f"offload: {part}")
        found[part] = runs[part]()
    return {
        "date": str(date.today()),
        "processor": processor(),
        "disk": f"files on {mount_of(folder).kind}",
        "versions": versions("terrazzo", "torch", "deepspeed"),
        "command": "python -m benchmarks.offload",
        **found,
    }


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--path", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to measure"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="others stay as --out has them")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    kept = chosen.out / "record.json"
    before = json.loads(kept.read_text()) if kept.exists() else {}
    record = {**before, **measure(chosen.path, chosen.parts)}
    kept.write_text(json.dumps(record) + "\n")
    (chosen.out / "report.md").write_text(report(record))
    print(report(record))


if __name__ == "__main__":
    main()
