"""Writes the page's table of targets from the committed record: `python -m benchmarks.timeline.page`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.timeline.report import conditions, outcomes_of, targets_table

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "timeline" / "record.json"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- measured: python -m benchmarks.timeline.page -->", "<!-- end of measured -->"


def section(record: dict[str, Any]) -> str:
    """Every target beside the worst cell, between the two marks."""
    return "\n".join([BEGIN, conditions(record), "", targets_table(outcomes_of(record)), "", END])


def update(text: str, record: dict[str, Any]) -> str:
    """`text` with a new section in the place of the old one."""
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: section(record), text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text(), json.loads(RECORD.read_text())))
