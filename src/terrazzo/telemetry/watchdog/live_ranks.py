"""Where the ranks of a run are now, for `terrazzo watch`."""

from __future__ import annotations

import time
from pathlib import Path

from terrazzo.telemetry.flight.folder import LiveRank, ranks_are_gone, tails_of
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
        self._tails: dict[LiveRank, Tail] = {}
        self._progress_of: dict[LiveRank, RankProgress] = {}
        self._gone_since: float | None = None

    def gone_s(self) -> float:
        """For how many seconds no rank has been there any more, as far as was seen; 0 while that is not known."""
        if not ranks_are_gone(self._run):
            self._gone_since = None
            return 0.0
        now = time.monotonic()
        self._gone_since = now if self._gone_since is None else self._gone_since
        return now - self._gone_since

    def lines(self) -> list[str]:
        """A line for each rank that runs on this machine: step, phase, unit, and what it waits for."""
        self._tails = tails_of(self._run, self._tails)
        self._progress_of = {live: self._progress_of.get(live, RankProgress()) for live in self._tails}
        for live, tail in self._tails.items():
            if events := tail.new():
                self._progress_of[live].take(tail.table, events)
        now = time.monotonic_ns()
        there = {live.rank: progress for live, progress in self._progress_of.items() if not progress.has_left}
        return [f"rank {rank:<4} {progress.line(now)}" for rank, progress in there.items()]
