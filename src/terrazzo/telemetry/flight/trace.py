"""The flights of all ranks as one timeline in Chrome's trace format, which https://ui.perfetto.dev shows.

Each rank is a process there, and each row a thread of it. Spans that overlap, such as a gather and a reduction, are on
different rows; only units nest on one row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from terrazzo.telemetry.flight.clocks import clock_shifts
from terrazzo.telemetry.flight.ring import EventKind, Flight
from terrazzo.telemetry.flight.spans import GROUPS, FlightSpan, spans_of

__all__ = ["trace_of"]

_ROWS = 100
"""Most rows of a group; what would need more is left out, and counted."""


def trace_of(flights: Sequence[Flight], steps: int) -> dict[str, Any]:
    """The last `steps` steps, and what came after them, as an object to be written as JSON.

    Times of other machines are shifted so that steps end at the same time: `clock_shifts`.

    Args:
        flights: of the ranks of one run.
        steps: how many; all that are recorded, if those are fewer.
    """
    ends = [{each.ordinal: each.time for each in flight.events if each.kind == EventKind.STEP} for flight in flights]
    moved = clock_shifts([flight.table["boot"] for flight in flights], ends)
    spans = [spans_of(flight) for flight in flights]
    begins = [_begin_of(own, steps) for own in spans]
    newest = [[span for span in own if span.end > begin] for own, begin in zip(spans, begins, strict=True)]
    origin = min((span.start + moved[index] for index, own in enumerate(newest) for span in own), default=0)
    events: list[dict[str, Any]] = []
    for index, (flight, own) in enumerate(zip(flights, newest, strict=True)):
        shift = moved[index] - origin
        events += _of_rank(flight, own, shift)
        first = min((span.start for span in own), default=0)
        events += _counters(flight, first, shift)
    hosts = sorted({flight.table["host"] for flight in flights})
    left_out = sum(map(len, newest)) - sum(event["ph"] == "X" for event in events)
    about = {"ranks": len(flights), "hosts": hosts, "spans_left_out": left_out}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _begin_of(spans: Sequence[FlightSpan], steps: int) -> int:
    """When the first of the last `steps` steps began; 0 if fewer are recorded."""
    begins = [span.start for span in spans if span.group == "step"]
    return begins[-steps] if len(begins) >= steps else 0


def _of_rank(flight: Flight, spans: Sequence[FlightSpan], shift: int) -> Iterator[dict[str, Any]]:
    rank, table = flight.table["rank"], flight.table
    name = f"rank {rank} (host {table['host']}, pid {table['pid']})"
    yield _about("process_name", rank, 0, name=name)
    yield _about("process_sort_index", rank, 0, sort_index=rank)
    by_group: Mapping[str, list[FlightSpan]] = defaultdict(list)
    for span in spans:
        by_group[span.group].append(span)
    for number, group in enumerate(GROUPS):
        rows = [by_group[group]] if group == "unit" else _apart(by_group[group])
        for row, content in enumerate(rows[:_ROWS]):
            thread = number * _ROWS + row
            if content:
                title = f"{group}s" + (f" {row + 1}" if len(rows) > 1 else "")
                yield _about("thread_name", rank, thread, name=title)
                yield _about("thread_sort_index", rank, thread, sort_index=thread)
            for span in content:
                more = {key: value for key, value in span.more.items() if key != "issued"}
                at = {"ts": (span.start + shift) / 1e3, "dur": (span.end - span.start) / 1e3}
                yield {"name": span.name, "cat": group, "ph": "X", "pid": rank, "tid": thread, **at, "args": more}


def _apart(spans: Iterable[FlightSpan]) -> list[list[FlightSpan]]:
    """Spread spans over rows so that none overlap on a row."""
    rows: list[list[FlightSpan]] = []
    for span in sorted(spans, key=lambda each: (each.start, each.end)):
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _counters(flight: Flight, first: int, shift: int) -> Iterator[dict[str, Any]]:
    """Counters: bytes of transient memory whenever they change, and resident bytes at the end of steps."""
    before = -1
    for event in flight.events:
        if event.time < first:
            continue
        at = {"ph": "C", "pid": flight.table["rank"], "ts": (event.time + shift) / 1e3}
        if event.kind in (EventKind.ISSUED, EventKind.DONE, EventKind.BEGINS, EventKind.ENDS) and event.live != before:
            before = event.live
            yield {"name": "transient memory", **at, "args": {"bytes": event.live}}
        elif event.kind == EventKind.STEP and event.value:
            yield {"name": "resident memory", **at, "args": {"bytes": event.value}}


def _about(what: str, rank: int, thread: int, **values: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": values}
