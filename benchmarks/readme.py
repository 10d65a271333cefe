"""Writes the README's table of measurements from the committed record: `python -m benchmarks.readme`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.outcome import Outcome, of_contender, ratio
from benchmarks.report import conditions, label
from benchmarks.suite import cases_of

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "cpu" / "record.json"
BEGIN, END = "<!-- measured: python -m benchmarks.readme -->", "<!-- end of measured -->"

PAIRS = [
    ("terrazzo-zero0", "ddp"),
    ("terrazzo-zero0", "deepspeed-0"),
    ("terrazzo-zero1", "zero-redundancy"),
    ("terrazzo-zero1", "deepspeed-1"),
    ("terrazzo-zero2", "zero-redundancy"),
    ("terrazzo-zero2", "deepspeed-2"),
    ("terrazzo-zero3", "fsdp2"),
    ("terrazzo-zero3", "fsdp1"),
    ("terrazzo-zero3", "deepspeed-3"),
]


def section(record: dict[str, Any]) -> str:
    """Step time and peak memory of each plan as a part of each peer's, between the two marks."""
    cases = cases_of(record)
    lines = [f"| | {' | '.join(cases)} |", f"|---|{'--:|' * len(cases)}"]
    for own, peer in PAIRS:
        cells = [_cell(own, peer, outcomes) for outcomes in cases.values()]
        if any(cells):
            lines.append(f"| {label(own)} / {label(peer)} | {' | '.join(cells)} |")
    return "\n".join([BEGIN, conditions(record), "", *lines, END])


def update(text: str, record: dict[str, Any]) -> str:
    """`text` with a new section in the place of the old one."""
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: section(record), text, flags=re.DOTALL)


def _cell(own: str, peer: str, outcomes: Sequence[Outcome]) -> str:
    time = ratio(own, peer, outcomes)
    if time is None:
        return ""
    mine, its = (median(o.training_peak_bytes for o in of_contender(name, outcomes)) for name in (own, peer))
    return f"{time:.2f} · {mine / its:.2f}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(update(readme.read_text(), json.loads(RECORD.read_text())))
