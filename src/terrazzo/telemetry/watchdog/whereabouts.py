"""Where the ranks of a run are now, for somebody who looks from another terminal."""

from __future__ import annotations

import time
from pathlib import Path

from terrazzo.telemetry.flight.folder import tails_of
from terrazzo.telemetry.flight.ring import Tail
from terrazzo.telemetry.watchdog.standing import Standing

__all__ = ["Whereabouts"]


class Whereabouts:
    """Reads what ranks record, each record once.

    Args:
        run: its folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._tails: dict[int, Tail] = {}
        self._standings: dict[int, Standing] = {}

    def lines(self) -> list[str]:
        """One for each rank that goes on on this machine: step, phase, unit, and what it waits for."""
        if not self._tails:
            self._tails = tails_of(self._run)
            self._standings = {rank: Standing() for rank in self._tails}
        for rank, tail in self._tails.items():
            if records := tail.new():
                self._standings[rank].take(tail.table, records)
        now = time.monotonic_ns()
        there = {rank: standing for rank, standing in self._standings.items() if not standing.has_left}
        return [f"rank {rank:<4} {standing.line(now)}" for rank, standing in there.items()]
