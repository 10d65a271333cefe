"""Writes the README's chart of measurements from the committed record: `python -m benchmarks.readme`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu.outcome import Outcome, ratio, ratios
from benchmarks.cpu.suite import cases_of

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "cpu" / "record.json"
CHART = RECORD.with_name("against-fsdp2.svg")
BEGIN, END = "<!-- measured: python -m benchmarks.readme -->", "<!-- end of measured -->"

OWN, PEER = "terrazzo-zero3", "fsdp2"
WORKLOADS = {
    "traffic": "moving weights takes longest",
    "traffic-4": "the same on four ranks",
    "bf16": "the same in bf16",
    "balanced": "moving and computing take as long",
    "compute": "computing takes longest",
}
"""What the chart calls the cases that it shows."""


def section(record: dict[str, Any]) -> str:
    """The chart, with its numbers for whoever cannot see it, and where it was measured; between the two marks."""
    cases = cases_of(record)
    numbers = "; ".join(f"{name}: {ratio(OWN, PEER, cases[case]):.2f}" for case, name in WORKLOADS.items())
    alt = f"Step time of Terrazzo zero3 as a part of FSDP2's. {numbers}."
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if name != "numpy")
    where = f"{record['date']}, {record['processor']}, two gloo ranks on one machine; {versions}."
    return "\n".join([BEGIN, f"![{alt}]({CHART.relative_to(ROOT)})", "", where, END])


def update(text: str, record: dict[str, Any]) -> str:
    """`text` with a new section in the place of the old one."""
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: section(record), text, flags=re.DOTALL)


def draw(cases: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """A bar for each workload, the median, with a line from the smallest to the largest turn; SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "terrazzo"  # the same bytes for the same record
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots(figsize=(8, 2.6))
    found = [ratios(OWN, PEER, cases[case]) for case in WORKLOADS]
    medians = [ratio(OWN, PEER, cases[case]) or 0.0 for case in WORKLOADS]
    spread = [[m - min(values) for m, values in zip(medians, found, strict=True)]]
    spread.append([max(values) - m for m, values in zip(medians, found, strict=True)])
    panel.barh(list(WORKLOADS.values()), medians, 0.6, xerr=spread, color="#c2562d", error_kw={"lw": 1})
    for row, (value, values) in enumerate(zip(medians, found, strict=True)):
        panel.text(max(values) + 0.015, row, f"{value:.2f}", va="center", fontsize=9)
    panel.axvline(1, color="#6d6f76", lw=1, ls="--")
    panel.text(1, -0.75, "FSDP2", ha="center", fontsize=9, color="#6d6f76")
    panel.set_xlim(0, 1.15)
    panel.set_xlabel("step time of Terrazzo zero3, FSDP2 = 1; less is faster", fontsize=9)
    panel.tick_params(labelsize=9)
    panel.invert_yaxis()
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    readme, record = ROOT / "README.md", json.loads(RECORD.read_text())
    readme.write_text(update(readme.read_text(), record))
    draw(cases_of(record), CHART)
