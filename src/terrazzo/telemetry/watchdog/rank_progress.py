"""How far a rank has come, and what it waits for, from the events that it has recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.engine.labels.purposes import Purpose
from terrazzo.telemetry.flight.ring import BEGINS, DONE, ENDS, ISSUED, PHASE, STEP, WAITED, WAITS, FlightEvent
from terrazzo.telemetry.flight.spans import TableNames

__all__ = ["LEFT", "ExchangeKey", "RankProgress"]

LEFT = "end"
"""The phase of a rank that has left in order and is no longer watched."""

ExchangeKey = tuple[str, str, bool, int]
"""An exchange: axis, kind, whether it carries activations, ordinal. It is the same for all ranks along the axis."""

_MOST_REMEMBERED = 64
"""Newest exchanges of a track that are remembered: more than can be under way at once."""

_AGE_S = 2.0
"""Seconds after which `line` says that a rank has recorded nothing."""

_REPORTED = 8
"""Newest exchanges of a track that are reported to other machines."""

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


class RankProgress:
    """One rank: what it waits for, what it has issued, which phase it is in, and how long phases have lasted.

    Attributes:
        newest: time of its newest event, in nanoseconds; 0 before the first.
        steps: how many it has finished while being watched.
        step: number of the newest finished step.
        phase: that it is in now; empty before the first.
        unit: that runs now; empty if none does.
        slowest: nanoseconds of the longest finished instance of each phase.
    """

    def __init__(self) -> None:
        self.table: Mapping[str, Any] = {}
        self.newest, self.steps, self.step, self.phase, self.unit = 0, 0, 0, "", ""
        self.slowest: dict[str, int] = defaultdict(int)
        self._names, self._since = TableNames({}), 0
        self._waits: dict[tuple[int, int], FlightEvent] = {}
        self._sequence = 0  # of the newest event
        self._issued: dict[int, dict[int, FlightEvent]] = defaultdict(dict)

    def take(self, table: Mapping[str, Any], events: Iterable[FlightEvent]) -> None:
        """Take in the rank's events since the last call."""
        self.table, self._names = table, TableNames(table)
        for event in events:
            self.newest = event.time if event.time > self.newest else self.newest
            if event.sequence != self._sequence + 1:  # events were lost, and ends of waits may be among them
                self._waits.clear()
            self._sequence, kind = event.sequence, event.kind
            if kind == DONE:
                continue
            if kind == ISSUED:
                mine = self._issued[event.track]
                mine[event.ordinal] = event
                if len(mine) > _MOST_REMEMBERED:
                    del mine[next(iter(mine))]
            elif kind == WAITS:
                self._waits[event.track, event.ordinal] = event
            elif kind == WAITED:
                self._waits.pop((event.track, event.ordinal), None)
            elif kind == PHASE:
                self._turn(event)
            elif kind == BEGINS:
                self.unit = self._names.unit(event.unit)
            elif kind == ENDS:
                self.unit = ""
            elif kind == STEP:
                self.steps, self.step = self.steps + 1, event.ordinal

    def to_json(self) -> dict[str, Any]:
        """What is needed to say why the run stands still, as plain JSON."""
        issued = {track: [*mine.values()][-_REPORTED:] for track, mine in self._issued.items()}
        return {
            "table": dict(self.table),
            "waits": [[track, event] for (track, _), event in self._waits.items()],
            "issued": list(issued.items()),
            "phase": [self.phase, self._since],
            "steps": [self.steps, self.step],
            "slowest": dict(self.slowest),
            "newest": self.newest,
        }

    @staticmethod
    def from_json(message: Mapping[str, Any], later_ns: int) -> RankProgress:
        """What `to_json` returned on another machine, whose clock is `later_ns` behind this one's.

        Raises:
            KeyError, TypeError, ValueError: the message is something else.
        """

        def here(each: list[int]) -> FlightEvent:
            return FlightEvent(*each)._replace(time=int(each[0]) + later_ns)

        made = RankProgress()
        made.table, made._names = message["table"], TableNames(message["table"])
        made._waits = {(track, each[2]): here(each) for track, each in message["waits"]}
        for track, mine in message["issued"]:
            made._issued[track] = {each[2]: here(each) for each in mine}
        made.phase, made._since = message["phase"][0], message["phase"][1] + later_ns
        made.steps, made.step = message["steps"]
        made.slowest.update(message["slowest"])
        made.newest = message["newest"] + later_ns
        return made

    @property
    def has_left(self) -> bool:
        """Whether the rank has ended in order, or is about to."""
        return self.phase == LEFT

    def _turn(self, event: FlightEvent) -> None:
        if self.phase:
            self.slowest[self.phase] = max(self.slowest[self.phase], event.time - self._since)
        self.phase, self._since, self.unit = self._names.name(event), event.time, ""

    @property
    def waits(self) -> dict[ExchangeKey, FlightEvent]:
        """The exchanges with other ranks that it waits for, with the event that began the wait. Waits for its own
        updates are none.
        """
        by_exchange = {(*self._names.track(track), n): event for (track, n), event in self._waits.items()}
        return {key: event for key, event in by_exchange.items() if key[1] != "update"}

    def line(self, now: int) -> str:
        """Where it is, on one line; `now`: the present time in nanoseconds of CLOCK_MONOTONIC."""
        parts = [f"step {self.step + 1}", self.phase or "setup", *([self.unit] if self.unit else [])]
        for (_, kind, _, _), event in list(self.waits.items())[:1]:
            unit = self._names.moved(event)
            parts.append(
                f"waits for {kind}{f' of {unit}' if unit else ''} since {max(0, now - event.time) / 1e9:.1f} s"
            )
        if (age_s := (now - self.newest) / 1e9) >= _AGE_S:
            parts.append(f"nothing for {age_s:.0f} s")
        return "  ".join(parts)

    def ranks(self, key: ExchangeKey) -> list[int]:
        """The ranks that take part in an exchange that it waits for."""
        groups = self.table["groups"]
        return list(groups.get(key[0], groups[""]))

    def issued(self, key: ExchangeKey) -> FlightEvent | None:
        """Its event of issuing an exchange; None if it has not, or that is not remembered."""
        return self._issued_beside(key).get(key[3])

    def has_come_to(self, key: ExchangeKey) -> bool:
        """Whether it has issued that exchange, or a later one on the same track."""
        return max(self._issued_beside(key), default=0) >= key[3]

    def _issued_beside(self, key: ExchangeKey) -> Mapping[int, FlightEvent]:
        """The exchanges that it has issued on the track of that one, by ordinal."""
        tracks, wanted = self.table.get("tracks", []), list(key[:3])
        return self._issued.get(tracks.index(wanted), {}) if wanted in tracks else {}

    def words(self, key: ExchangeKey) -> str:
        """An exchange in words, for a sentence."""
        axis, kind, activations, ordinal = key
        where = f"on {axis}" if axis else "of all ranks"
        parts = [f"{kind} {ordinal} {where}{', of activations' if activations else ''}"]
        event = self.issued(key)
        if event is not None and not activations:
            if (unit := self._names.moved(event)) is not None:
                parts.append(unit if unit == "the root unit" else f"unit {unit}")
            if doing := _PASSES.get(Purpose(event.purpose)):
                parts.append(doing)
        return ", ".join([*parts, f"step {self.step + 1}"])
