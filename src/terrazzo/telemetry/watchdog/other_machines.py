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
"""Seconds for wardens to find each other before a missing one is reported."""


class OtherMachines:
    """What this machine's warden knows of ranks on other machines.

    Attributes:
        system: answers for processes here, and for ranks elsewhere by the numbers that its `pid` gives them.
    """

    def __init__(self, links: WardenLinks, patience: Patience) -> None:
        self._links, self._patience = links, patience
        self.system = _RemoteSystem()
        self._seen: dict[int, int] = {}  # by machine, when its newest report that was taken in had come
        self._began, self._has_said_unheard = time.monotonic(), False

    def ranks(self) -> dict[int, tuple[RecordSource, int]]:
        """All ranks on other machines, as `Watchdog` takes them."""
        places = self._links.others.values()
        return {rank: (_NoRecords(), self.system.pid(rank)) for place in places for rank in place.ranks}

    def send(self, message: Mapping[str, Any]) -> None:
        """Tell the other machines about the ranks here."""
        self._links.send(message)

    def take_reports(self, progress_of: dict[int, RankProgress]) -> Stall | None:
        """Take in the reports of other machines; returns the stall that one of them has found, if any."""
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
        """Whether a machine is silent, so that not all waits are known; `say` is told, once, of one never heard."""
        unheard = [place for number, place in self._links.others.items() if self._links.report_of(number) is None]
        if unheard and not self._has_said_unheard and time.monotonic() - self._began > _UNHEARD_S:
            self._has_said_unheard = True
            say(
                f"Nobody looks whether ranks stand still: the warden of host {unheard[0].host} is not heard at"
                f" {unheard[0].address}, port {unheard[0].port}. Let machines of the run reach each other on all ports."
            )
        return bool(unheard) or any(self._links.silent_s(number) for number in self._links.others)

    def cut_off(self, here: Mapping[int, RankProgress]) -> Stall | None:
        """The stall of a silent machine that ranks here wait for; None if there is no such machine.

        A machine counts as silent if it was heard before. One that was not may have a warden that is still starting: it
        counts if it could be reached when ranks began, and not even its kernel answers now.
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
        """Send the last report: a stall, which also ends the ranks elsewhere, or that all ranks here have ended."""
        if stall is not None:
            self._links.leave({**message, "stall": [stall.cause, list(stall.ranks), stall.text]}, "stall")
        else:
            self._links.leave(message, "ended")


class _RemoteSystem(System):
    """Answers about processes here, and about ranks elsewhere under negative numbers, from the reports of wardens."""

    def __init__(self) -> None:
        self._facts: dict[int, Mapping[str, Any]] = {}

    @staticmethod
    def pid(rank: int) -> int:
        """The number that stands for a rank on another machine."""
        return -1 - rank

    def take(self, rank: int, facts: Mapping[str, Any], later_ns: int) -> RankProgress:
        """Take in the facts of a rank; returns its progress. While the rank moves, its report has no details."""
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
        """A fact of the newest report; before the first, the value of a rank that is well."""
        return self._facts.get(pid, {}).get(name, before)


class _NoRecords:
    """Stands for the ring of a rank on another machine, which the warden there reads."""

    table: Mapping[str, Any] = {}

    def new(self) -> list[FlightEvent]:
        return []
