"""Idle time of pipeline schedules."""

from __future__ import annotations

from terrazzo.planner.setup.setup import Setup

__all__ = ["bubble", "idle_share"]

DEFERRED_SHARE = 1 / 3
"""Of the idle time of 1F1B, what is left where gradients of weights are put off: F + B - W of F + B + W, which take as
long each (ZB-H1, arXiv 2401.10241, table 2)."""


def idle_share(setup: Setup) -> float:
    """`bubble` of a setup's schedule."""
    share = DEFERRED_SHARE if setup.pipeline == "zero_bubble" else 1.0
    return share * bubble(setup.mesh.pp, setup.micro_batches, setup.virtual_stages)


def bubble(pp: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Idle time of a stage over its useful time: (pp - 1) / (virtual_stages * micro_batches).

    GPipe and 1F1B idle equally long with one model chunk per rank, the interleaved schedule less with several
    (Megatron-LM, arXiv 2104.04473, section 2.2). That one runs groups of `pp` micro-batches through one chunk after the
    other: a last group that is not full waits between its chunks for what is missing.
    """
    missing = -micro_batches % pp
    return (pp - 1 + (virtual_stages - 1) * missing) / (virtual_stages * micro_batches)
