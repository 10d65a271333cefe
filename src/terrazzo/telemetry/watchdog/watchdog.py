"""Looks whether ranks stand still, and says which one is at fault and why. Its owner keeps evidence and ends the ranks.

It runs in another process, that of the launcher or of a warden, where the ranks' interpreters and devices cannot hold
it up. What may take long, such as a first step, an evaluation or a checkpoint, is no stall; a rank that still computes
is none either, but is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from terrazzo.processes.standard_streams import say_on_stderr
from terrazzo.processes.system import is_traced, processor_s, state_of, waits_for_drive
from terrazzo.telemetry.flight.ring import FlightEvent
from terrazzo.telemetry.watchdog.rank_progress import RankProgress
from terrazzo.telemetry.watchdog.repeated_stops import RepeatedStops
from terrazzo.telemetry.watchdog.stall import GONE, ProcessFacts, Stall, find_stall, hindered

__all__ = ["LOOK_EVERY_S", "Patience", "RecordSource", "System", "Watchdog"]

LOOK_EVERY_S = 0.25
_LATE_S = 2.0
"""A look that comes so many seconds after the one before: the watchdog itself was stopped, or the machine suspended."""

_TIMES_SLOWEST = 5
"""A phase may take so many times its longest instance so far."""
_BUSY = 0.05
"""A rank that has used at least this share of one CPU while the run stands still is at work."""

_STEADY = ("forward", "backward", "clip", "update", "input", "other")
"""Phases that take about as long each time. Others may last as long as ranks wait for each other."""


class Patience(NamedTuple):
    """How long nothing may happen.

    Attributes:
        stall_s: the least number of seconds.
        timeout_s: seconds after which ranks give up waiting for each other, which is the most.
        own_loop: whether the loop is the user's: what it does between steps is not known.
    """

    stall_s: float
    timeout_s: float
    own_loop: bool = False


class RecordSource(Protocol):
    """What a rank has recorded; a `Tail` of its ring is one."""

    @property
    def table(self) -> Mapping[str, Any]:
        """The names that its events refer to."""

    def new(self) -> list[FlightEvent]:
        """The rank's events since the last call."""


class System:
    """Answers about processes, and the time; tests and other machines have their own."""

    def state(self, pid: int) -> str:
        return state_of(pid)

    def traced(self, pid: int) -> bool:
        return is_traced(pid)

    def waits_for_drive(self, pid: int) -> bool:
        return waits_for_drive(pid)

    def processor_s(self, pid: int) -> float:
        """CPU seconds that the process and its children have used."""
        return processor_s(pid)

    def now(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC, which events have."""
        return time.monotonic_ns()

    def slept_s(self) -> float:
        """Seconds for which the machine has been suspended since it was booted."""
        if not hasattr(time, "CLOCK_BOOTTIME"):
            return 0.0
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


class Watchdog:
    """Looks at the events of all ranks when it is called, at most four times a second.

    Args:
        ranks: for each rank, what it records, and its pid.
        patience: how long nothing may happen.
        system: answers about the ranks' processes; default: this machine.
        say: is told of a stall that is not final, such as a slow rank.
    """

    def __init__(
        self,
        ranks: Mapping[int, tuple[RecordSource, int]],
        patience: Patience,
        system: System | None = None,
        say: Callable[[str], object] = say_on_stderr,
    ) -> None:
        self._tails = {rank: tail for rank, (tail, _) in ranks.items()}
        self._pids = {rank: pid for rank, (_, pid) in ranks.items()}
        self._patience, self._say = patience, say
        self._system = system or System()
        self.progress_of = {rank: RankProgress() for rank in ranks}
        self._looked = self._armed = self._system.now()
        self._slept_s, self._is_said = self._system.slept_s(), False
        self._stopped_since: dict[int, int] = {}
        self._newest = 0
        self._waited_for_drive: set[int] = set()  # ranks that have waited for a drive since the newest event
        self._used: tuple[int, dict[int, float]] | None = None
        self._stops = RepeatedStops(ranks)

    def look(self) -> Stall | None:
        """The stall of a run that stands still for good, else None. A stall that may pass is said, once."""
        now = self._system.now()
        since_looked = now - self._looked
        if since_looked < LOOK_EVERY_S * 1e9:
            return None
        self._looked = now
        self.read()
        if self._slept() or since_looked > _LATE_S * 1e9:
            self._armed = now
            self._stops.forget()
        states = self._states()
        if is_excused := self._is_excused(states):
            self._stops.forget()
        self._report_stops(states)
        newest = max(self._armed, *(progress.newest for progress in self.progress_of.values()))
        if newest > self._newest:
            self._newest, self._used, self._is_said = newest, None, False
            self._waited_for_drive.clear()
            self._stopped_since.clear()
            return None
        if is_excused:
            self._armed = now
            return None
        if self._used is None:  # nothing has happened since the last look: count CPU time from now on
            self._used = (now, self._processors())
        else:
            self._waited_for_drive |= {rank for rank, pid in self._pids.items() if self._system.waits_for_drive(pid)}
        if (stopped := self._stopped(now, states)) is not None:
            return stopped
        if now - newest < self._limit_s(states) * 1e9:
            return None
        stall = self._find(self._facts(now, states), now)
        if stall.is_final:
            return stall
        if not self._is_said:
            self._is_said = True
            if self._awaited or not self._patience.own_loop:
                self._say(stall.text)
        return None

    def read(self) -> None:
        """Take in the new events of all ranks."""
        for rank, tail in self._tails.items():
            if events := tail.new():
                self.progress_of[rank].take(tail.table, events)

    def why(self) -> Stall:
        """What the stall would be now, however short it is so far."""
        now = self._system.now()
        return self._find(self._facts(now, self._states()), now)

    def _find(self, facts: Mapping[int, ProcessFacts], now: int) -> Stall:
        there = {rank: progress for rank, progress in self.progress_of.items() if not progress.has_left}
        return find_stall(there or self.progress_of, facts, now, own_loop=self._patience.own_loop)

    def _report_stops(self, states: Mapping[int, str]) -> None:
        """Say which ranks are stopped over and over, of those that are taking steps."""
        at_steps = [rank for rank, progress in self.progress_of.items() if progress.steps and not progress.has_left]
        for rank, share in self._stops.look({rank: states[rank] for rank in at_steps}):
            self._say(hindered(rank, share, self.progress_of).text)

    def _states(self) -> dict[int, str]:
        return {rank: self._system.state(pid) for rank, pid in self._pids.items()}

    @property
    def _awaited(self) -> bool:
        """Whether a rank waits for others."""
        return any(progress.waits for progress in self.progress_of.values())

    def _slept(self) -> bool:
        """Whether the machine was suspended since the last call."""
        before, self._slept_s = self._slept_s, self._system.slept_s()
        return self._slept_s - before > 1.0

    def _is_excused(self, states: Mapping[int, str]) -> bool:
        """Whether nothing is expected to happen: all ranks are stopped, or a debugger has one."""
        return all(state in ("T", "t") for state in states.values()) or any(
            map(self._system.traced, self._pids.values())
        )

    def _stopped(self, now: int, states: Mapping[int, str]) -> Stall | None:
        """The stall of ranks that have been stopped for long, in any phase, while another rank waits."""
        for rank, state in states.items():
            if state in ("T", "t") and not self.progress_of[rank].has_left:
                self._stopped_since.setdefault(rank, now)
            else:
                self._stopped_since.pop(rank, None)
        long = [rank for rank, since in self._stopped_since.items() if now - since >= self._patience.stall_s * 1e9]
        awaited = any(self.progress_of[rank].waits for rank in self.progress_of if rank not in long)
        if not (long and awaited):
            return None
        return self._find({rank: ProcessFacts(state, False) for rank, state in states.items()}, now)

    def _limit_s(self, states: Mapping[int, str]) -> float:
        """Seconds for which nothing may happen in the phases that ranks are in now."""
        if any(state in GONE and not self.progress_of[rank].has_left for rank, state in states.items()):
            return self._patience.stall_s
        now_in = [progress.phase for progress in self.progress_of.values()]
        if any(phase not in _STEADY for phase in now_in) or not all(each.steps for each in self.progress_of.values()):
            return float("inf")
        slowest = max(
            progress.slowest[phase] for progress, phase in zip(self.progress_of.values(), now_in, strict=True)
        )
        return min(self._patience.timeout_s, max(self._patience.stall_s, _TIMES_SLOWEST * slowest / 1e9))

    def _processors(self) -> dict[int, float]:
        return {rank: self._system.processor_s(pid) for rank, pid in self._pids.items()}

    def _facts(self, now: int, states: Mapping[int, str]) -> dict[int, ProcessFacts]:
        used = self._processors()
        since, before = self._used or (now, used)
        wanted_s = _BUSY * (now - since) / 1e9
        return {
            rank: ProcessFacts(
                state, state == "R" or used[rank] - before[rank] > wanted_s, rank in self._waited_for_drive
            )
            for rank, state in states.items()
        }
