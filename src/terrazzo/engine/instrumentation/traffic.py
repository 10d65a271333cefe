"""What is counted of exchanges: bytes sent, time waited, memory held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from terrazzo.engine.instrumentation.recorder import SILENT, Recorder
from terrazzo.engine.instrumentation.times import Times
from terrazzo.engine.labels.label import moving

__all__ = ["Ledger", "Traffic", "kind_of_traffic"]


def kind_of_traffic(kind: str, what: str) -> str:
    """The kind of traffic that a planned collective counts as: gathered sums of gradients end an all-reduce.

    Args:
        kind, what: as in `MoveBytes`.
    """
    return "all_reduce" if (kind, what) == ("all_gather", "gradients") else kind


@dataclass
class Traffic:
    """Collectives that one rank took part in, bytes that it sent, and how long it waited; the first two are exact.

    Of what ranks agree on, the bytes are those of the numbers: see `control_exchanges` for what goes around them.

    Attributes:
        count, bytes: by kind of collective.
        times: the same by mesh axis and kind, with how long it took; activations have no axis but their own.
        along: beside these, what modules exchange of activations, by mesh axis: `tp`, `cp`.
    """

    count: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    times: dict[tuple[str, str], Times] = field(default_factory=dict)
    along: dict[str, Traffic] = field(default_factory=dict)
    _recorder: Recorder = field(default=SILENT, repr=False)
    _activations_along: str | None = None

    def record(self, kind: str, sent_bytes: int, count: int = 1, axis: str = "") -> None:
        self.count[kind] += count
        self.bytes[kind] += sent_bytes
        self.times_of(axis, kind).issue(count, sent_bytes, moving.get())

    def times_of(self, axis: str, kind: str) -> Times:
        """The `Times` of exchanges of that kind along that axis."""
        if (times := self.times.get((axis, kind))) is None:
            times = self.times[axis, kind] = Times()
            self._set_recorder(axis, kind, times)
        return times

    def count_along(self, along: Mapping[str, Traffic]) -> None:
        """Count what modules exchange of activations too: where each axis counts it."""
        self.along |= along

    def set_recorder(self, recorder: Recorder, activations_along: str | None = None) -> None:
        """Report to `recorder` what is exchanged from now on.

        Args:
            activations_along: the axis, where this counts what modules exchange.
        """
        self._recorder, self._activations_along = recorder, activations_along
        for (axis, kind), times in self.times.items():
            self._set_recorder(axis, kind, times)
        for axis, each in self.along.items():
            each.set_recorder(recorder, axis)

    def _set_recorder(self, axis: str, kind: str, times: Times) -> None:
        along = self._activations_along
        track = self._recorder.track(axis if along is None else along, kind, along is not None)
        times.set_recorder(self._recorder, track)

    def reset(self) -> None:
        self.count.clear()
        self.bytes.clear()
        for times in self.times.values():
            times.clear()
        for each in self.along.values():
            each.reset()

    def by_name(self) -> dict[str, int]:
        """Bytes by kind; of what modules exchange by axis and kind, such as `tp all_gather`, flags left out."""
        by_name = dict(self.bytes)
        for axis, traffic in self.along.items():
            by_name |= {f"{axis} {kind}": sent for kind, sent in traffic.bytes.items() if kind != "control"}
        return by_name

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds, along all axes."""
        return sum(self.bytes.values()) + sum(each.total_bytes for each in self.along.values())

    @property
    def wait_s(self) -> float:
        """Seconds that this rank stood waiting for weights and gradients."""
        return sum(times.exposed_s for (_, kind), times in self.times.items() if kind not in _NOT_DATA)

    @property
    def control_wait_s(self) -> float:
        """Seconds that this rank stood waiting for a few numbers, such as norms: so for the rank that comes last."""
        own = sum(times.exposed_s for (_, kind), times in self.times.items() if kind == "control")
        return own + sum(each.control_wait_s for each in self.along.values())

    @property
    def waited_ever_s(self) -> float:
        """Seconds that this rank stood waiting for others, and for updates off the device, from the start on."""
        own = sum(times.ever_s for times in self.times.values())
        return own + sum(each.waited_ever_s for each in self.along.values())

    @property
    def total_wait_s(self) -> float:
        """Seconds that this rank stood waiting for weights, gradients and activations."""
        return self.wait_s + sum(each.total_wait_s for each in self.along.values())


_NOT_DATA = ("control", "update")
"""Kinds of waits for what is neither weights nor gradients: for small numbers, and for updates of this rank itself."""


@dataclass
class Ledger:
    """Bytes of transient memory held now, and at most: gathered weights, unreduced gradients, receive buffers."""

    live_bytes: int = 0
    peak_bytes: int = 0

    def acquire(self, count_bytes: int) -> None:
        self.live_bytes += count_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, count_bytes: int) -> None:
        self.live_bytes -= count_bytes

    def reset(self) -> None:
        """Forget the peak: what is held now is the most from here on."""
        self.peak_bytes = self.live_bytes

    @contextmanager
    def holding(self, count_bytes: int) -> Iterator[None]:
        self.acquire(count_bytes)
        try:
            yield
        finally:
            self.release(count_bytes)
