"""Idle time of pipeline schedules: how much longer a step is because ranks along pp wait for one another."""

from __future__ import annotations

from terrazzo.planner.figures import Formula, Term
from terrazzo.planner.setup.setup import Setup

__all__ = ["FORMULAS", "bubble", "bubble_term", "idle_share"]

FORMULAS = {
    "time.bubble": Formula(
        "busy_s * (pp - 1 + (virtual_stages - 1) * missing) / (virtual_stages * micro_batches); missing are the "
        "micro-batches that would fill the last group of Megatron-core's interleaved schedule, none in the engine's, "
        "whose groups are all full; a third of it under zero_bubble",
        "arXiv 2104.04473 section 2.2; arXiv 2401.10241 table 2; terrazzo/parallel/pipeline/schedules.py",
    ),
}

DEFERRED_SHARE = 1 / 3
"""What is left of 1F1B's idle time where gradients of weights are put off: F + B - W of F + B + W, which take as long
each (ZB-H1, arXiv 2401.10241, table 2)."""


def bubble_term(setup: Setup, busy_s: float) -> Term:
    """What a step takes longer in a pipeline whose slowest rank is busy for `busy_s`."""
    idle = busy_s * idle_share(setup)
    schedule = {"pp": setup.mesh.pp, "micro_batches": setup.micro_batches, "virtual_stages": setup.virtual_stages}
    return Term(
        "pipeline bubble", idle, idle, "time.bubble", {"busy_s": busy_s, "missing": _missing(setup), **schedule}, "s"
    )


def idle_share(setup: Setup) -> float:
    """`bubble` of a setup's schedule."""
    share = DEFERRED_SHARE if setup.pipeline == "zero_bubble" else 1.0
    return share * bubble(setup.mesh.pp, setup.micro_batches, setup.virtual_stages, _missing(setup))


def bubble(pp: int, micro_batches: int, virtual_stages: int = 1, missing: int = 0) -> float:
    """Idle time of a rank over its useful time: (pp - 1) / (virtual_stages * micro_batches) if all groups are full.

    GPipe and 1F1B idle equally long with one model chunk per rank, the interleaved schedule less with several
    (Megatron-LM, arXiv 2104.04473, section 2.2). That one runs groups of micro-batches through one chunk after the
    other. The engine's are of one size, `pp` or a little more (`pipeline.schedules.rounds_of`), so that nothing
    waits between them: tests hold this equal to its list of actions. Megatron-core's are of `pp`, and a last one that
    is not full waits between its chunks for what is `missing`.
    """
    return (pp - 1 + (virtual_stages - 1) * missing) / (virtual_stages * micro_batches)


def _missing(setup: Setup) -> int:
    return -setup.micro_batches % setup.mesh.pp if setup.as_megatron else 0
