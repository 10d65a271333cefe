"""What clocks of several machines differ by, by steps that all ranks of a run end together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

__all__ = ["clock_shifts"]


def clock_shifts(boots: Sequence[str], ends: Sequence[Mapping[int, int]]) -> list[int]:
    """Nanoseconds to add to the times of each rank: nothing where it shares the first rank's clock, as ranks of one
    machine do; elsewhere such that steps end at the same time, in the median: all ranks have just exchanged something.

    Args:
        boots: of each rank's machine, which names its clock.
        ends: by step, when each rank ended it by its own clock.
    """
    shifts = []
    for boot, own in zip(boots, ends, strict=True):
        shared = own.keys() & ends[0].keys() if boot != boots[0] else ()
        shifts.append(int(median(ends[0][step] - own[step] for step in shared)) if shared else 0)
    return shifts
