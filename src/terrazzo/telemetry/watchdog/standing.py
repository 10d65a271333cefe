"""Where a rank stands, by what it has recorded so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.engine.links.label import Purpose
from terrazzo.telemetry.flight.ring import BEGINS, DONE, ENDS, ISSUED, PHASE, STEP, WAITED, WAITS, Told
from terrazzo.telemetry.flight.spans import Names

__all__ = ["LEFT", "Key", "Standing"]

LEFT = "end"
"""The phase of a rank that nobody looks after any more."""

Key = tuple[str, str, bool, int]
"""An exchange: axis, kind, whether modules exchange, ordinal. Ranks of an axis mean the same by it."""

_KEPT = 64
"""Exchanges of a track that are remembered: more than can be under way."""

_AGE_S = 2.0
"""A rank that has recorded nothing for so long is said to."""

_TOLD = 8
"""Exchanges of a track that other machines are told of."""

_PASSES = {
    Purpose.FORWARD: "forward",
    Purpose.EVALUATION: "evaluation",
    Purpose.BACKWARD: "backward",
    Purpose.GRADIENT: "backward",
    Purpose.PARTIAL: "backward",
    Purpose.UPDATED: "update",
    Purpose.END_OF_FORWARD: "forward",
    Purpose.END_OF_BACKWARD: "backward",
}


class Standing:
    """One rank: what it waits for, what it has asked for, which phase it is in and how long phases have lasted.

    Attributes:
        newest: when it has recorded something last, in nanoseconds; 0 for never.
        steps: that it has ended.
        step: number of the newest of these.
        phase: it is in now; empty before the first.
        unit: that runs now; empty where none does.
        slowest: nanoseconds of the slowest instance of each phase that has ended.
    """

    def __init__(self) -> None:
        self.table: Mapping[str, Any] = {}
        self.newest, self.steps, self.step, self.phase, self.unit = 0, 0, 0, "", ""
        self.slowest: dict[str, int] = defaultdict(int)
        self._names, self._since = Names({}), 0
        self._waits: dict[tuple[int, int], Told] = {}
        self._sequence = 0  # of the newest record
        self._issued: dict[int, dict[int, Told]] = defaultdict(dict)

    def take(self, table: Mapping[str, Any], records: Iterable[Told]) -> None:
        """What it has recorded since."""
        self.table, self._names = table, Names(table)
        for told in records:
            self.newest = told.time if told.time > self.newest else self.newest
            if told.sequence != self._sequence + 1:  # overtaken: an end of these may be among what was lost
                self._waits.clear()
            self._sequence, event = told.sequence, told.event
            if event == DONE:
                continue
            if event == ISSUED:
                mine = self._issued[told.track]
                mine[told.ordinal] = told
                if len(mine) > _KEPT:
                    del mine[next(iter(mine))]
            elif event == WAITS:
                self._waits[told.track, told.ordinal] = told
            elif event == WAITED:
                self._waits.pop((told.track, told.ordinal), None)
            elif event == PHASE:
                self._turn(told)
            elif event == BEGINS:
                self.unit = self._names.unit(told.unit)
            elif event == ENDS:
                self.unit = ""
            elif event == STEP:
                self.steps, self.step = self.steps + 1, told.ordinal

    def told(self) -> dict[str, Any]:
        """All of it that says why a run stands still, as plain JSON."""
        issued = {track: [*mine.values()][-_TOLD:] for track, mine in self._issued.items()}
        return {
            "table": dict(self.table),
            "waits": [[track, told] for (track, _), told in self._waits.items()],
            "issued": list(issued.items()),
            "phase": [self.phase, self._since],
            "steps": [self.steps, self.step],
            "slowest": dict(self.slowest),
            "newest": self.newest,
        }

    @staticmethod
    def of(told: Mapping[str, Any], later_ns: int) -> Standing:
        """What `told` has given on another machine, whose clock is that much behind this one's.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """

        def here(each: list[int]) -> Told:
            return Told(*each)._replace(time=int(each[0]) + later_ns)

        made = Standing()
        made.table, made._names = told["table"], Names(told["table"])
        made._waits = {(track, each[2]): here(each) for track, each in told["waits"]}
        for track, mine in told["issued"]:
            made._issued[track] = {each[2]: here(each) for each in mine}
        made.phase, made._since = told["phase"][0], told["phase"][1] + later_ns
        made.steps, made.step = told["steps"]
        made.slowest.update(told["slowest"])
        made.newest = told["newest"] + later_ns
        return made

    @property
    def has_left(self) -> bool:
        """Whether it has ended in order, or is about to."""
        return self.phase == LEFT

    def _turn(self, told: Told) -> None:
        if self.phase:
            self.slowest[self.phase] = max(self.slowest[self.phase], told.time - self._since)
        self.phase, self._since, self.unit = self._names.name(told), told.time, ""

    @property
    def waits(self) -> dict[Key, Told]:
        """For which exchanges with other ranks, and since when; an update of its own is none."""
        found = {(*self._names.track(track), n): told for (track, n), told in self._waits.items()}
        return {key: told for key, told in found.items() if key[1] != "update"}

    def line(self, now: int) -> str:
        """Where it is at that moment, in nanoseconds of the clock of records, on one line."""
        parts = [f"step {self.step + 1}", self.phase or "setup", *([self.unit] if self.unit else [])]
        for (_, kind, _, _), told in list(self.waits.items())[:1]:
            unit = self._names.moved(told) if told.purpose else None
            parts.append(f"waits for {kind}{f' of {unit}' if unit else ''} since {max(0, now - told.time) / 1e9:.1f} s")
        if (age_s := (now - self.newest) / 1e9) >= _AGE_S:
            parts.append(f"nothing for {age_s:.0f} s")
        return "  ".join(parts)

    def ranks(self, key: Key) -> list[int]:
        """Who takes part in an exchange that it waits for."""
        groups = self.table["groups"]
        return list(groups.get(key[0], groups[""]))

    def issued(self, key: Key) -> Told | None:
        """What it has said of an exchange that it has asked for."""
        tracks = self.table.get("tracks", [])
        track = tracks.index(list(key[:3])) if list(key[:3]) in tracks else -1
        return self._issued[track].get(key[3])

    def has_come_to(self, key: Key) -> bool:
        """Whether it has asked for that exchange, or for a later one on its track."""
        tracks = self.table.get("tracks", [])
        track = tracks.index(list(key[:3])) if list(key[:3]) in tracks else -1
        return max(self._issued[track], default=0) >= key[3]

    def words(self, key: Key) -> str:
        """An exchange, as a sentence names it."""
        axis, kind, activations, ordinal = key
        where = f"on {axis}" if axis else "of all ranks"
        parts = [f"{kind} {ordinal} {where}{', of activations' if activations else ''}"]
        told = self.issued(key)
        if told is not None and not activations:
            if (unit := self._names.moved(told)) is not None:
                parts.append(unit if unit == "the root unit" else f"unit {unit}")
            if doing := _PASSES.get(Purpose(told.purpose)):
                parts.append(doing)
        return ", ".join([*parts, f"step {self.step + 1}"])
