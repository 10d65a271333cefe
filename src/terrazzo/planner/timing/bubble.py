"""Idle time of pipeline schedules."""

from __future__ import annotations

__all__ = ["bubble"]


def bubble(pp: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Idle time of a stage over its useful time: (pp - 1) / (virtual_stages * micro_batches).

    GPipe and 1F1B idle equally long with one model chunk per rank, the interleaved schedule less with several
    (Megatron-LM, arXiv 2104.04473, section 2.2). That one runs groups of `pp` micro-batches through one chunk after the
    other: a last group that is not full waits between its chunks for what is missing.
    """
    missing = -micro_batches % pp
    return (pp - 1 + (virtual_stages - 1) * missing) / (virtual_stages * micro_batches)
