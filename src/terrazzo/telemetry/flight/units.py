"""What each unit of a rank takes of a step, from the rank's flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from terrazzo.telemetry.flight.ring import Flight
from terrazzo.telemetry.flight.spans import FlightSpan, spans_of

__all__ = ["UnitTimes", "unit_times"]

MOST_STEPS = 20


class UnitTimes(NamedTuple):
    """Mean seconds of a step that a unit takes.

    Attributes:
        unit: its name.
        forward, recompute, backward: running, without nested units and without waits; on CUDA, time of the host.
        gather_wait: the host waiting for the unit's weights.
        reduce_wait: the host waiting for sums of the unit's gradients.
    """

    unit: str
    forward: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0
    gather_wait: float = 0.0
    reduce_wait: float = 0.0

    @property
    def total(self) -> float:
        return sum(self[1:])


_WAITS = {"all_gather": "gather_wait", "broadcast": "gather_wait"}


def unit_times(flight: Flight) -> list[UnitTimes]:
    """Times of units over the newest complete steps of a flight, in the model's order; empty if there are none."""
    spans = spans_of(flight)
    steps = [span for span in spans if span.group == "step"][1:][-MOST_STEPS:]  # the first may lack its beginning
    if not steps:
        return []
    start, end = steps[0].start, steps[-1].end
    inside = [span for span in spans if span.group in ("unit", "wait") and start <= span.start and span.end <= end]
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span, own in _own(inside):
        if "unit" in span.more:
            what = span.more["doing"] if span.group == "unit" else _WAITS.get(span.more["kind"], "reduce_wait")
            seconds[span.more["unit"]][what] += own / 1e9 / len(steps)
    names = [name or "the root unit" for name in flight.table["units"]]
    ordered = sorted(seconds, key=lambda name: names.index(name) if name in names else len(names))
    return [UnitTimes(name, **seconds[name]) for name in ordered]


def _own(spans: Sequence[FlightSpan]) -> Iterator[tuple[FlightSpan, int]]:
    """Each span with its own nanoseconds: without spans nested in it."""
    inner: dict[int, int] = defaultdict(int)
    open_: list[tuple[int, FlightSpan]] = []
    for index, span in sorted(enumerate(spans), key=lambda each: (each[1].start, -each[1].end)):
        while open_ and open_[-1][1].end <= span.start:
            open_.pop()
        if open_:
            inner[open_[-1][0]] += min(span.end, open_[-1][1].end) - span.start
        open_.append((index, span))
    for index, span in enumerate(spans):
        yield span, max(0, span.end - span.start - inner[index])
