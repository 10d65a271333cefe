"""What of tensor and context parallelism's exchanges nothing hides: `python -m benchmarks.timeline.exposed`.

Two GPUs of one host; blocks of a decoder, of which the ranks share matrices or sequences; milliseconds of one block,
forward and backward. Every kernel but products of matrices takes no time, so shares are the most that there can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.timeline.machines import Cell
from benchmarks.timeline.suite import told
from hostcuda.build import library

__all__ = ["rows"]

AXES = [
    {"axis": "tp", "size": 2, "mode": None},
    *({"axis": "cp", "size": 2, "mode": mode} for mode in ("gather", "ulysses", "ring")),
]
GPU, LENGTHS = "H100", (8192, 32768)

HEAD = ("axis", "tokens", "computing", "exchanges", "exposed forward", "exposed backward", "exposed", "of the step")


def rows(outcomes: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    """Of a table under `HEAD`, in milliseconds; the last but one is of the exchanges."""
    for found in outcomes:
        exchanges_s = sum(found["exchanges_s"].values())
        forward_s, backward_s = (sum(found[f"{stage}_waits_s"].values()) for stage in ("forward", "backward"))
        exposed_s = forward_s + backward_s
        name = " ".join([f"{found['axis']} {found['size']}", *filter(None, [found["mode"]])])
        times_ms = (1e3 * each for each in (found["computing_s"], exchanges_s, forward_s, backward_s))
        shares = exposed_s / exchanges_s, exposed_s / (found["computing_s"] + exposed_s)
        yield [name, f"{found['tokens']:,}", *(f"{each:.3f}" for each in times_ms), *(f"{each:.1%}" for each in shares)]


def main() -> None:
    """Prints the table in Markdown."""
    library()  # built before anybody waits for a rank
    cells = [Cell("host", GPU, tokens) for tokens in LENGTHS]
    job = {"ranks": 2, "axes": AXES, "cells": [{"cell": c.record(), "figures": asdict(c.figures())} for c in cells]}
    print("| " + " | ".join(HEAD) + " |\n" + "|---|" + "--:|" * (len(HEAD) - 1))
    for row in rows(told(job)):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
