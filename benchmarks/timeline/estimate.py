"""What the planner says of the steps that are simulated."""

from __future__ import annotations

from benchmarks.timeline.machines import Cell, free_launches
from terrazzo.planner.timing.step import time_of

__all__ = ["ABSENT", "planned_s"]

ABSENT = ("time.contention", "time.host")
"""Terms of what the simulated device does not have: collectives that slow kernels down, and CPUs that take time."""


def planned_s(cell: Cell, plan: str) -> float:
    """Seconds of a step, without what the simulated device does not have."""
    with free_launches():
        found = time_of(cell.setup(plan))
    if isinstance(found, str):
        raise ValueError(f"{plan} on {cell}: {found}")
    return sum(term.value for term in found.terms if term.formula not in ABSENT)
