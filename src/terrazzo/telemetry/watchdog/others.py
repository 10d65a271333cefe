"""Ranks of other machines, as their wardens tell of them, and machines whose wardens tell nothing any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from terrazzo.telemetry.flight.ring import Tail, Told
from terrazzo.telemetry.watchdog.looking import Patience, System
from terrazzo.telemetry.watchdog.stall import Stall, cut_off
from terrazzo.telemetry.watchdog.standing import LEFT, Standing
from terrazzo.telemetry.watchdog.wardens import Wardens

__all__ = ["Others"]

_UNHEARD_S = 60.0
"""For wardens to find each other before it is said that they do not."""


class Others:
    """What this machine's warden knows of ranks elsewhere.

    Attributes:
        system: answers for processes here, and by `pid` for ranks elsewhere.
    """

    def __init__(self, wardens: Wardens, patience: Patience) -> None:
        self._wardens, self._patience = wardens, patience
        self.system = _OtherMachines()
        self._seen: dict[int, int] = {}  # when each machine had said what is known
        self._began, self._said = time.monotonic(), False

    def ranks(self) -> dict[int, tuple[Tail, int]]:
        """For a `Watchdog`, all that are elsewhere."""
        places = self._wardens.others.values()
        return {rank: (_Nothing(), self.system.pid(rank)) for place in places for rank in place.ranks}

    def tell(self, message: Mapping[str, Any]) -> None:
        """Of the ranks here."""
        self._wardens.tell(message)

    def hear(self, standings: dict[int, Standing]) -> Stall | None:
        """Take in what other machines have told; the stall that one of them has found, if any."""
        for number in self._wardens.others:
            heard = self._wardens.heard(number)
            if heard is None or self._seen.get(number) == heard.at:
                continue
            self._seen[number] = heard.at
            if heard.message["leaves"] == "stall":
                return Stall(*heard.message["stall"])
            for name, told in heard.message["ranks"].items():
                standings[int(name)] = self.system.take(int(name), told, heard.later_ns)
        return None

    def silent(self, say: Callable[[str], object]) -> bool:
        """Whether a machine is not heard, so that nobody can tell what all wait for; said once, if it never was."""
        unheard = [place for number, place in self._wardens.others.items() if self._wardens.heard(number) is None]
        if unheard and not self._said and time.monotonic() - self._began > _UNHEARD_S:
            self._said = True
            say(
                f"Nobody looks whether ranks stand still: the warden of host {unheard[0].host} is not heard at"
                f" {unheard[0].address}, port {unheard[0].port}. Let machines of the run reach each other on all ports."
            )
        return bool(unheard) or any(self._wardens.silent_s(number) for number in self._wardens.others)

    def cut_off(self, here: Mapping[int, Standing]) -> Stall | None:
        """The machine that was heard, or was reached when ranks began, is silent now, and is waited for by ranks here.

        One that was reached only is silent where its kernel is, too: its warden may be on its way.
        """
        for number, place in self._wardens.others.items():
            heard = self._wardens.heard(number) is not None
            silent_s = self._wardens.silent_s(number) if heard else self._wardens.unreached_s(number)
            if silent_s >= self._patience.stall_s:
                now = time.monotonic_ns()
                if (found := cut_off(place, silent_s, here, now, self._patience.stall_s)) is not None:
                    return found
        return None

    def leave(self, message: Mapping[str, Any], stall: Stall | None) -> None:
        """Nothing more is told: for a stall, which ends the ranks elsewhere, too, or since all here have ended."""
        if stall is not None:
            self._wardens.leave({**message, "stall": [stall.cause, list(stall.ranks), stall.text]}, "stall")
        else:
            self._wardens.leave(message, "ended")


class _OtherMachines(System):
    """What there is to ask about processes here, and, by negative numbers, about ranks that wardens tell of."""

    def __init__(self) -> None:
        self._facts: dict[int, Mapping[str, Any]] = {}

    @staticmethod
    def pid(rank: int) -> int:
        """The number of a rank that is elsewhere."""
        return -1 - rank

    def take(self, rank: int, told: Mapping[str, Any], later_ns: int) -> Standing:
        """What is told of a rank; where it stands, which is not told while it moves."""
        self._facts[self.pid(rank)] = told
        standing = Standing.of(told["standing"], later_ns) if "standing" in told else Standing()
        standing.table = standing.table or told["table"]
        standing.newest = told["newest"] + later_ns if told["newest"] else 0
        if told["left"]:
            standing.phase = LEFT
        return standing

    def state(self, pid: int) -> str:
        return super().state(pid) if pid > 0 else str(self._fact(pid, "state", "S"))

    def traced(self, pid: int) -> bool:
        return super().traced(pid) if pid > 0 else bool(self._fact(pid, "traced", False))

    def waits_for_drive(self, pid: int) -> bool:
        return super().waits_for_drive(pid) if pid > 0 else bool(self._fact(pid, "drive", False))

    def processor_s(self, pid: int) -> float:
        return super().processor_s(pid) if pid > 0 else float(self._fact(pid, "used", 0.0))

    def _fact(self, pid: int, name: str, before: Any) -> Any:
        """Before anything was told, a rank is taken to be well."""
        return self._facts.get(pid, {}).get(name, before)


class _Nothing(Tail):
    """Of a rank whose records are not here."""

    def __init__(self) -> None:
        """Nothing is read."""

    def new(self) -> list[Told]:
        return []
