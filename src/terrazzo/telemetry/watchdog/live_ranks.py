"""Where the ranks of a run are now, for `terrazzo watch`."""

from __future__ import annotations

import time
from pathlib import Path

from terrazzo.telemetry.flight.folder import tails_of
from terrazzo.telemetry.flight.ring import Tail
from terrazzo.telemetry.watchdog.rank_progress import RankProgress

__all__ = ["LiveRanks"]


class LiveRanks:
    """The ranks of a running run, by what they record. Each event is read once.

    Args:
        run: the run's folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._tails: dict[int, Tail] = {}
        self._progress_of: dict[int, RankProgress] = {}

    def lines(self) -> list[str]:
        """A line for each rank that runs on this machine: step, phase, unit, and what it waits for."""
        if not self._tails:
            self._tails = tails_of(self._run)
            self._progress_of = {rank: RankProgress() for rank in self._tails}
        for rank, tail in self._tails.items():
            if events := tail.new():
                self._progress_of[rank].take(tail.table, events)
        now = time.monotonic_ns()
        there = {rank: progress for rank, progress in self._progress_of.items() if not progress.has_left}
        return [f"rank {rank:<4} {progress.line(now)}" for rank, progress in there.items()]
