"""`python -m benchmarks.planner`: evaluate the planner on published runs and write results/accuracy.md and .json."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.planner.accuracy import record, worst
from benchmarks.planner.evaluate import outcomes
from benchmarks.planner.rows import rows
from benchmarks.planner.text import markdown

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Prints the report, and after it the rows that are furthest off."""
    found = outcomes(rows())
    numbers = record(found)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "accuracy.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (RESULTS / "accuracy.md").write_text(markdown(numbers))
    print(markdown(numbers))
    print(worst(found))


if __name__ == "__main__":
    main()
