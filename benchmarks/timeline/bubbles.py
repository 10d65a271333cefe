"""How long ranks of a pipeline wait, beside what their schedules' papers say: `python -m benchmarks.timeline.bubbles`.

Stages are equal. First every kernel but products of matrices takes no time, and neither do messages: then waits are
those of the order alone. Then all take theirs, on GPUs of one host and of a host each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.timeline.machines import Cell
from benchmarks.timeline.suite import told
from hostcuda.build import library

__all__ = ["FREE", "SCHEDULES", "expected", "rows"]

SCHEDULES = {"1F1B": ("1f1b", 1), "interleaved, 2 chunks": ("1f1b", 2), "zero-bubble": ("zero_bubble", 1)}
RANKS, MICRO_BATCHES = (2, 4), (4, 8)
GPU, TOKENS = "H100", 4096

FREE = {"memory": 1e30, "near": 1e30, "far": 1e30, "hop_s": 0.0}
"""Figures of a machine on which nothing but products of matrices takes time."""

HEAD = ("ranks", "micro-batches", "schedule", "by the paper", "idle", "of 1F1B's", "one host", "of 1F1B's", "network",
        "of 1F1B's")  # fmt: skip


def expected(schedule: str, ranks: int, chunks: int, micro_batches: int) -> float:
    """The idle share where forward, and backward to inputs and to weights, take as long each, and nothing else does.

    1F1B waits R - 1 of its turns, with chunks turns that are shorter (Narayanan et al., arXiv 2104.04473, section 2.2),
    and ZB-H1 a third of that (Qi et al., arXiv 2401.10241, table 2).
    """
    waited = (ranks - 1) / chunks * (1 / 3 if schedule == "zero_bubble" else 1)
    return waited / (micro_batches + waited)


def rows(outcomes: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    """Of a table under `HEAD`."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for each in outcomes:
        key = each["ranks"], each["micro_batches"], each["schedule"], each["chunks"]
        found.setdefault(key, {})[each["layout"]] = each["idle"]
    for ranks, micro_batches in sorted({key[:2] for key in found}):
        plain = found[ranks, micro_batches, "1f1b", 1]
        for name, (schedule, chunks) in SCHEDULES.items():
            own = found[ranks, micro_batches, schedule, chunks]
            share = expected(schedule, ranks, chunks, micro_batches)
            cells = (text for layout, idle in own.items() for text in (f"{idle:.1%}", f"{idle / plain[layout]:.2f}"))
            yield [str(ranks), str(micro_batches), name, f"{share:.1%}", *cells]


def jobs() -> Iterator[dict[str, Any]]:
    """What ranks are to do."""
    host, network = (Cell(layout, GPU, TOKENS) for layout in ("host", "network"))
    cells = [
        {"cell": {**host.record(), "layout": "free"}, "figures": {**asdict(host.figures()), **FREE}},
        *({"cell": cell.record(), "figures": asdict(cell.figures())} for cell in (host, network)),
    ]
    schedules = [{"schedule": schedule, "chunks": chunks} for schedule, chunks in SCHEDULES.values()]
    for ranks in RANKS:
        yield {"ranks": ranks, "schedules": schedules, "micro_batches": MICRO_BATCHES, "cells": cells}


def main() -> None:
    """Prints the table in Markdown."""
    library()  # built before anybody waits for a rank
    print("| " + " | ".join(HEAD) + " |\n|--:|--:|---|" + "--:|" * (len(HEAD) - 3))
    for row in rows(outcome for job in jobs() for outcome in told(job)):
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
