"""Writes the page's tables of targets and waits from the committed record: `python -m benchmarks.timeline.page`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.timeline.report import above_table, conditions, outcomes_of, targets_table

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "timeline" / "record.json"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- measured: python -m benchmarks.timeline.page -->", "<!-- end of measured -->"


def section(record: dict[str, Any]) -> str:
    """Every target beside the worst cell, and what is waited for there, between the two marks."""
    outcomes = outcomes_of(record)
    return "\n".join([BEGIN, conditions(record), "", targets_table(outcomes), "", above_table(outcomes), "", END])


def update(text: str, record: dict[str, Any]) -> str:
    """`text` with a new section in the place of the old one."""
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: section(record), text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text(), json.loads(RECORD.read_text())))
