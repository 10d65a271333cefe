"""Looks after ranks that stand still: says which one it is and why, keeps what they were doing, and has them ended.

It runs in the process that has started them, where neither their interpreters nor their devices can hold it up. What
takes long by its nature, such as a first step, an evaluation or a checkpoint, is no stall; whoever computes is none
either, but is named.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from terrazzo.engine.runtime.system import is_traced, processor_s, state_of, waits_for_drive
from terrazzo.telemetry.flight.ring import Tail
from terrazzo.telemetry.watchdog.stall import Fact, Stall, find_stall
from terrazzo.telemetry.watchdog.standing import Standing

__all__ = ["Patience", "System", "Watchdog"]

_EVERY_S = 0.25
_LATE_S = 2.0
"""A watchdog that looks so late was stopped itself, or the machine slept."""

_TIMES_SLOWEST = 5
_BUSY = 0.05
"""Of one processor's time: a rank that has had so much while the run stands still, or waits for it, is at work."""

_STEADY = ("forward", "backward", "clip", "update", "input", "other")
"""Phases whose length is known from those before. All others are waited for as long as ranks wait for each other."""


class Patience(NamedTuple):
    """Seconds: how long nothing may happen, and after which ranks give up waiting for each other."""

    stall_s: float
    timeout_s: float


class System:
    """What there is to ask about a process, and the time."""

    def state(self, pid: int) -> str:
        return state_of(pid)

    def traced(self, pid: int) -> bool:
        return is_traced(pid)

    def waits_for_drive(self, pid: int) -> bool:
        return waits_for_drive(pid)

    def processor_s(self, pid: int) -> float:
        """That it has used, and what it has started."""
        return processor_s(pid)

    def now(self) -> int:
        """Nanoseconds of the clock that records have."""
        return time.monotonic_ns()

    def slept_s(self) -> float:
        """For how long the machine has been suspended so far."""
        if not hasattr(time, "CLOCK_BOOTTIME"):
            return 0.0
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


class Watchdog:
    """Looks at the records of all ranks, as often as it is called, and four times a second at most.

    Args:
        tails: of the ranks' rings, in their order.
        pids: of their processes.
        say: told of a rank that is slow, or waits for data.
    """

    def __init__(
        self,
        tails: Sequence[Tail],
        pids: Sequence[int],
        patience: Patience,
        system: System | None = None,
        say: Callable[[str], object] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self._tails, self._pids, self._patience, self._say = tails, pids, patience, say
        self._system = system or System()
        self.standings = {rank: Standing() for rank in range(len(tails))}
        self._looked = self._armed = self._system.now()
        self._slept_s, self._said = self._system.slept_s(), False
        self._stopped_since: dict[int, int] = {}
        self._newest = 0
        self._held: set[int] = set()  # ranks that have waited for a drive since the newest record
        self._used: tuple[int, dict[int, float]] | None = None

    def look(self) -> Stall | None:
        """Why the run stands still, if it does for good; what may still go on is said, once."""
        now = self._system.now()
        since_looked = now - self._looked
        if since_looked < _EVERY_S * 1e9:
            return None
        self._looked = now
        for rank, tail in enumerate(self._tails):
            if records := tail.new():
                self.standings[rank].take(tail.table, records)
        states = {rank: self._system.state(pid) for rank, pid in enumerate(self._pids)}
        self._arm(now, states, since_looked / 1e9)
        newest = max(self._armed, *(standing.newest for standing in self.standings.values()))
        if newest > self._newest:
            self._newest, self._used, self._said = newest, None, False
            self._held.clear()
        elif self._used is None:  # nothing has happened for a moment: from now on, what processors are had counts
            self._used = (now, self._processors())
        else:
            self._held |= {rank for rank, pid in enumerate(self._pids) if self._system.waits_for_drive(pid)}
        if (stopped := self._stopped(now, states)) is not None:
            return stopped
        if now - newest < self._limit_s() * 1e9:
            return None
        stall = find_stall(self.standings, self._facts(now, states), now)
        if stall.is_final:
            return stall
        if not self._said:
            self._said = True
            self._say(stall.text)
        return None

    def _arm(self, now: int, states: Mapping[int, str], late_s: float) -> None:
        """Begin to wait anew, where it is no wonder that nothing has happened."""
        slept_s = self._system.slept_s()
        woken = slept_s - self._slept_s > 1.0
        self._slept_s = slept_s
        traced = any(self._system.traced(pid) for pid in self._pids)
        if woken or traced or late_s > _LATE_S or all(state in ("T", "t") for state in states.values()):
            self._armed = now
            self._stopped_since.clear()

    def _stopped(self, now: int, states: Mapping[int, str]) -> Stall | None:
        """A rank that somebody has stopped, whatever it was at, and that another one waits for."""
        for rank, state in states.items():
            if state in ("T", "t"):
                self._stopped_since.setdefault(rank, now)
            else:
                self._stopped_since.pop(rank, None)
        long = [rank for rank, since in self._stopped_since.items() if now - since >= self._patience.stall_s * 1e9]
        awaited = any(self.standings[rank].waits for rank in self.standings if rank not in long)
        if not (long and awaited):
            return None
        return find_stall(self.standings, {rank: Fact(state, False) for rank, state in states.items()}, now)

    def _limit_s(self) -> float:
        """How long nothing may happen now."""
        now_in = [standing.phase for standing in self.standings.values()]
        if any(phase not in _STEADY for phase in now_in) or not all(each.steps for each in self.standings.values()):
            return float("inf")
        slowest = max(standing.slowest[phase] for standing, phase in zip(self.standings.values(), now_in, strict=True))
        return min(self._patience.timeout_s, max(self._patience.stall_s, _TIMES_SLOWEST * slowest / 1e9))

    def _processors(self) -> dict[int, float]:
        return {rank: self._system.processor_s(pid) for rank, pid in enumerate(self._pids)}

    def _facts(self, now: int, states: Mapping[int, str]) -> dict[int, Fact]:
        used = self._processors()
        since, before = self._used or (now, used)
        wanted_s = _BUSY * (now - since) / 1e9
        return {
            rank: Fact(state, state == "R" or used[rank] - before[rank] > wanted_s, rank in self._held)
            for rank, state in states.items()
        }
