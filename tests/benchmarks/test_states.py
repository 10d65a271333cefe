"""The report of losses with optimizer states of fewer bytes."""

from __future__ import annotations

from typing import Any

from benchmarks.states import report


def line(name: str, seed: int, loss: float) -> dict[str, Any]:
    where = {"versions": {"torch": "1"}, "processor": "a CPU"}
    return {"name": name, "seed": seed, "losses": {"25": 9.0, "250": loss}, "update_ms": 2.0, **where}


def test_means_are_of_the_seeds_that_ran() -> None:
    lines = [line("torch", 0, 2.0), line("torch", 1, 3.0), line("terrazzo-int8", 0, 2.02)]
    rows = report(lines).splitlines()
    assert "| torch | 2.0000 | 3.0000 | +0.00% | 2 |" in rows
    assert "| terrazzo-int8 | 2.0200 | not run | +1.00% | 2 |" in rows
    assert rows[-1] == "a CPU, one thread; torch 1."
