"""Spans of time made of events: steps, phases, units, waits, exchanges, moves between memory tiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from terrazzo.engine.labels.purposes import Purpose
from terrazzo.telemetry.flight.ring import EventKind, Flight, FlightEvent

__all__ = ["GROUPS", "FlightSpan", "TableNames", "spans_of"]

GROUPS = ("step", "phase", "unit", "wait", "exchange", "tier")
"""Groups of spans. Within steps, phases or units nothing overlaps, except that units nest."""


class FlightSpan(NamedTuple):
    """A span from `start` to `end`, in nanoseconds of CLOCK_MONOTONIC; `more`: details by name, strings and numbers."""

    group: str
    name: str
    start: int
    end: int
    more: Mapping[str, Any]


class TableNames:
    """Looks up the names that events refer to by number.

    Args:
        table: of the rank's ring.
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = table

    def name(self, event: FlightEvent) -> str:
        """The name of an event that is not of an exchange: a phase, a unit's pass, a move."""
        return self._of("names", event.track)

    def unit(self, index: int) -> str:
        return (self._of("units", index) or "the root unit") if index < len(self._table["units"]) else f"unit {index}"

    def track(self, number: int) -> tuple[str, str, bool]:
        """The axis and kind of a track's exchanges, and whether they carry activations."""
        tracks = self._table["tracks"]
        return tuple(tracks[number]) if number < len(tracks) else ("", "exchange", False)

    def ranks(self, track: int) -> list[int]:
        """The ranks that exchange on a track."""
        groups = self._table["groups"]
        return list(groups.get(self.track(track)[0], groups[""]))

    def moved(self, event: FlightEvent) -> str | None:
        """The unit whose tensors an exchange moves, if it does."""
        return self.unit(event.unit) if Purpose(event.purpose).moves_a_unit else None

    def _of(self, field: str, number: int) -> str:
        names = self._table[field]
        return str(names[number]) if number < len(names) else str(number)


def spans_of(flight: Flight) -> list[FlightSpan]:
    """All spans of one rank, in the order of their ends. What has not ended lasts until the newest event."""
    collected = _SpanReader(TableNames(flight.table))
    for event in flight.events:
        collected.take(event)
    if flight.events:
        collected.close(max(event.time for event in flight.events))
    return collected.spans


class _SpanReader:
    def __init__(self, names: TableNames) -> None:
        self._names, self.spans = names, list[FlightSpan]()
        self._step: int | None = None
        self._phase: FlightEvent | None = None
        self._units: list[FlightEvent] = []
        self._issued: dict[tuple[int, int], FlightEvent] = {}
        self._waits: dict[tuple[int, int], FlightEvent] = {}

    def take(self, event: FlightEvent) -> None:
        key = (event.track, event.ordinal)
        if self._step is None:
            self._step = event.time
        if event.kind == EventKind.ISSUED:
            self._issued[key] = event
        elif event.kind == EventKind.DONE:
            self._exchange(event, self._issued.get(key))
        elif event.kind == EventKind.WAITS:
            self._waits[key] = event
        elif event.kind == EventKind.WAITED:
            self._waits.pop(key, None)
            self._wait(event, event.since, event.time)
        elif event.kind == EventKind.PHASE:
            self._turn(event)
        elif event.kind == EventKind.BEGINS:
            self._begin(event)
        elif event.kind == EventKind.ENDS:
            self._end(event)
        elif event.kind == EventKind.MOVED:
            self._add("tier", self._names.name(event), event.since, event.time, bytes=event.value)
        elif event.kind == EventKind.STEP:
            self._end_units(event.time)
            self._add("step", f"step {event.ordinal}", self._step, event.time, step=event.ordinal, resident=event.value)
            self._step = event.time

    def close(self, now: int) -> None:
        """Close what is open: there are no more events."""
        self._end_units(now)
        for event in self._waits.values():
            self._wait(event, event.time, now, unfinished=True)
        if self._phase is not None:
            self._add("phase", self._names.name(self._phase), self._phase.time, now)

    def _exchange(self, event: FlightEvent, issued: FlightEvent | None) -> None:
        axis, kind, activations = self._names.track(event.track)
        more: dict[str, Any] = {"axis": axis, "n": event.ordinal}
        if event.value:
            more["all_there_after_us"] = max(0, event.value - event.since) / 1e3
        if issued is not None:
            more |= {"sent_bytes": issued.value, "issued": issued.time}
            if (unit := self._names.moved(issued)) is not None and not activations:
                more |= {"unit": unit, "purpose": Purpose(issued.purpose).name.lower()}
        self._add("exchange", f"{axis} {kind}".strip(), event.since, event.time, **more)

    def _wait(self, event: FlightEvent, start: int, end: int, **more: Any) -> None:
        axis, kind, _ = self._names.track(event.track)
        name = "an update" if kind == "update" else f"{axis} {kind}".strip()
        issued = self._issued.get((event.track, event.ordinal))
        if issued is not None and (unit := self._names.moved(issued)) is not None:
            more |= {"unit": unit, "kind": kind}
        self._add("wait", f"wait for {name}", start, end, n=event.ordinal, **more)

    def _turn(self, event: FlightEvent) -> None:
        self._end_units(event.time)
        if self._phase is not None:
            self._add("phase", self._names.name(self._phase), self._phase.time, event.time)
        self._phase = event

    def _begin(self, event: FlightEvent) -> None:
        if self._units and self._names.name(self._units[-1]) == "backward":
            self._end_units(event.time)  # the next one begins
        self._units.append(event)

    def _end(self, event: FlightEvent) -> None:
        """End a unit, and those within it that an exception left open. Ends of unknown units are ignored."""
        if event.unit in [each.unit for each in self._units]:
            while self._close_unit(event.time).unit != event.unit:
                pass

    def _end_units(self, now: int) -> None:
        while self._units:
            self._close_unit(now)

    def _close_unit(self, now: int) -> FlightEvent:
        begun = self._units.pop()
        doing = self._names.name(begun)
        more = {"doing": doing, "micro_batch": begun.micro, "unit": self._names.unit(begun.unit)}
        self._add("unit", f"{more['unit']} {doing}", begun.time, now, **more)
        return begun

    def _add(self, group: str, name: str, start: int, end: int, **more: Any) -> None:
        self.spans.append(FlightSpan(group, name, start, max(start, end), more))
