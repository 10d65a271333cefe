"""The report of adapters on a base in 4 bits."""

from __future__ import annotations

from typing import Any

from benchmarks.qlora import FORMS, report

WHERE = {"versions": {"torch": "1"}, "processor": "a CPU"}


def test_means_are_of_all_seeds_and_times_of_the_same_tokens() -> None:
    lines: list[dict[str, Any]] = []
    for place, name in enumerate(FORMS):
        lines += [{"kind": "time", "name": name, "tokens": 256, "width": 8, "step_s": 2.0 + place, **WHERE}]
        for seed in (0, 1):
            lines += [{"kind": "loss", "name": name, "seed": seed, "before": 4.0, "after": 2.0 + seed + place, **WHERE}]
    rows = report(lines).splitlines()
    assert "| nf4 | 4.0000 | 3.0000 | 4.0000 | 3.5000 |" in rows
    assert "| nf4 | 256 | 8 | 3.00 | 1.50 |" in rows
