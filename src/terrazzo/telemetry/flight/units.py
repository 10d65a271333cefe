"""What each unit of a rank takes of a step, by what it has recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from terrazzo.telemetry.flight.ring import Flight
from terrazzo.telemetry.flight.spans import Bar, bars_of

__all__ = ["UnitTimes", "unit_times"]

MOST_STEPS = 20


class UnitTimes(NamedTuple):
    """Seconds of a step, in the mean.

    Attributes:
        unit: by name.
        forward, recompute, backward: that it ran, without units inside of it and without waits; of the host on CUDA.
        gather_wait: that the host waited for its weights.
        reduce_wait: that the host waited for sums of its gradients.
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
    """The times of units in the newest whole steps of a flight, in the model's order; empty before there is one."""
    bars = bars_of(flight)
    steps = [bar for bar in bars if bar.group == "step"][1:][-MOST_STEPS:]  # the first one may have lost its begin
    if not steps:
        return []
    start, end = steps[0].start, steps[-1].end
    inside = [bar for bar in bars if bar.group in ("unit", "wait") and start <= bar.start and bar.end <= end]
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for bar, own in _own(inside):
        if "unit" in bar.more:
            what = bar.more["doing"] if bar.group == "unit" else _WAITS.get(bar.more["kind"], "reduce_wait")
            seconds[bar.more["unit"]][what] += own / 1e9 / len(steps)
    names = [name or "the root unit" for name in flight.table["units"]]
    ordered = sorted(seconds, key=lambda name: names.index(name) if name in names else len(names))
    return [UnitTimes(name, **seconds[name]) for name in ordered]


def _own(bars: Sequence[Bar]) -> Iterator[tuple[Bar, int]]:
    """Each with the nanoseconds that none inside of it takes."""
    inner: dict[int, int] = defaultdict(int)
    open_: list[tuple[int, Bar]] = []
    for index, bar in sorted(enumerate(bars), key=lambda each: (each[1].start, -each[1].end)):
        while open_ and open_[-1][1].end <= bar.start:
            open_.pop()
        if open_:
            inner[open_[-1][0]] += min(bar.end, open_[-1][1].end) - bar.start
        open_.append((index, bar))
    for index, bar in enumerate(bars):
        yield bar, max(0, bar.end - bar.start - inner[index])
