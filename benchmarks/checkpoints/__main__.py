"""`python -m benchmarks.checkpoints`: see `measure`."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.checkpoints.measure import Effort, measure
from benchmarks.checkpoints.report import report
from benchmarks.cpu.cases import CASES


def main() -> None:
    """Measure, write the record and the report, print the report."""
    parser = argparse.ArgumentParser(description="Saving and loading beside other libraries.")
    parser.add_argument("--case", choices=list(CASES), default=Effort.case)
    parser.add_argument("--rounds", type=int, default=Effort.rounds)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    chosen = parser.parse_args()
    record = measure(Effort(chosen.case, chosen.rounds), chosen.scratch)
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "record.json").write_text(json.dumps(record) + "\n")
    (chosen.out / "report.md").write_text(report(record))
    print(report(record))


if __name__ == "__main__":
    main()
