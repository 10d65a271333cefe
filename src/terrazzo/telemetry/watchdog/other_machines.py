"""The ranks of other machines, as their wardens report them, and machines whose wardens have fallen silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from terrazzo.telemetry.flight.ring import FlightEvent
from terrazzo.telemetry.watchdog.rank_progress import LEFT, RankProgress
from terrazzo.telemetry.watchdog.stall import Stall, cut_off
from terrazzo.telemetry.watchdog.warden_links import WardenLinks
from terrazzo.telemetry.watchdog.watchdog import Patience, RecordSource, System

__all__ = ["OtherMachines"]

_UNHEARD_S = 60.0
"""For wardens to find each other before it is said that they do not."""


class OtherMachines:
    """What this machine's warden knows of ranks elsewhere.

    Attributes:
        system: answers for processes here, and by `pid` for ranks elsewhere.
    """

    def __init__(self, links: WardenLinks, patience: Patience) -> None:
        self._links, self._patience = links, patience
        self.system = _RemoteSystem()
        self._seen: dict[int, int] = {}  # by machine, when its newest report that was taken in had come
        self._began, self._has_said_unheard = time.monotonic(), False

    def ranks(self) -> dict[int, tuple[RecordSource, int]]:
        """For a `Watchdog`, all that are elsewhere."""
        places = self._links.others.values()
        return {rank: (_NoRecords(), self.system.pid(rank)) for place in places for rank in place.ranks}

    def send(self, message: Mapping[str, Any]) -> None:
        """Tell the other machines of the ranks here."""
        self._links.send(message)

    def take_reports(self, progress_of: dict[int, RankProgress]) -> Stall | None:
        """Take in what other machines report; returns the stall that one of them has found, if any."""
        for number in self._links.others:
            report = self._links.report_of(number)
            if report is None or self._seen.get(number) == report.at:
                continue
            self._seen[number] = report.at
            if report.message["leaves"] == "stall":
                return Stall(*report.message["stall"])
            for name, facts in report.message["ranks"].items():
                progress_of[int(name)] = self.system.take(int(name), facts, report.later_ns)
        return None

    def any_silent(self, say: Callable[[str], object]) -> bool:
        """Whether a machine is silent, so that nobody knows what all wait for; one that always was is said, once."""
        unheard = [place for number, place in self._links.others.items() if self._links.report_of(number) is None]
        if unheard and not self._has_said_unheard and time.monotonic() - self._began > _UNHEARD_S:
            self._has_said_unheard = True
            say(
                f"Nobody looks whether ranks stand still: the warden of host {unheard[0].host} is not heard at"
                f" {unheard[0].address}, port {unheard[0].port}. Let machines of the run reach each other on all ports."
            )
        return bool(unheard) or any(self._links.silent_s(number) for number in self._links.others)

    def cut_off(self, here: Mapping[int, RankProgress]) -> Stall | None:
        """The stall of a silent machine that ranks here wait for; None where there is no such machine.

        A machine counts as silent if it was heard before, or if it was reached when ranks began and not even its kernel
        answers now: its warden may be on its way.
        """
        for number, place in self._links.others.items():
            was_heard = self._links.report_of(number) is not None
            silent_s = self._links.silent_s(number) if was_heard else self._links.unreached_s(number)
            if silent_s >= self._patience.stall_s:
                now = time.monotonic_ns()
                if (stall := cut_off(place, silent_s, here, now, self._patience.stall_s)) is not None:
                    return stall
        return None

    def leave(self, message: Mapping[str, Any], stall: Stall | None) -> None:
        """Report for the last time: a stall, which ends the ranks elsewhere, too, or that all ranks here have ended."""
        if stall is not None:
            self._links.leave({**message, "stall": [stall.cause, list(stall.ranks), stall.text]}, "stall")
        else:
            self._links.leave(message, "ended")


class _RemoteSystem(System):
    """What there is to ask about processes here, and, by negative numbers, about ranks that wardens tell of."""

    def __init__(self) -> None:
        self._facts: dict[int, Mapping[str, Any]] = {}

    @staticmethod
    def pid(rank: int) -> int:
        """The number of a rank that is elsewhere."""
        return -1 - rank

    def take(self, rank: int, facts: Mapping[str, Any], later_ns: int) -> RankProgress:
        """Take in the facts of a rank; returns its progress, of which nothing is reported while it moves."""
        self._facts[self.pid(rank)] = facts
        progress = RankProgress.from_json(facts["progress"], later_ns) if "progress" in facts else RankProgress()
        progress.table = progress.table or facts["table"]
        progress.newest = facts["newest"] + later_ns if facts["newest"] else 0
        if facts["left"]:
            progress.phase = LEFT
        return progress

    def state(self, pid: int) -> str:
        return super().state(pid) if pid > 0 else str(self._fact(pid, "state", "S"))

    def traced(self, pid: int) -> bool:
        return super().traced(pid) if pid > 0 else bool(self._fact(pid, "traced", False))

    def waits_for_drive(self, pid: int) -> bool:
        return super().waits_for_drive(pid) if pid > 0 else bool(self._fact(pid, "drive", False))

    def processor_s(self, pid: int) -> float:
        return super().processor_s(pid) if pid > 0 else float(self._fact(pid, "used", 0.0))

    def _fact(self, pid: int, name: str, before: Any) -> Any:
        """A rank is taken to be well before the first report of it."""
        return self._facts.get(pid, {}).get(name, before)


class _NoRecords:
    """The records of a rank on another machine, whose warden reads them there: none here."""

    table: Mapping[str, Any] = {}

    def new(self) -> list[FlightEvent]:
        return []
