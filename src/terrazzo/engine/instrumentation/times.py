"""How long exchanges take, and how long the host stands waiting for them.

Where a thread does the work it notes three moments: it has begun, all other ranks are there, it is done. So a wait for
a rank that comes late stands apart from a wait for bytes. Where the device does the work the host does not know when:
it waits for nothing there but small numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from terrazzo.engine.instrumentation.recorder import SILENT, Recorder
from terrazzo.engine.labels.label import Label

__all__ = ["Moments", "Times"]


@dataclass
class Moments:
    """When an exchange had begun, all other ranks were there, and it was done: `time.perf_counter()`, in seconds.

    Each is None before; `ready` stays so where nobody can say.
    """

    begun: float | None = None
    ready: float | None = None
    done: float | None = None


@dataclass
class Times:
    """Exchanges of one kind along one axis; seconds.

    Attributes:
        count: how many.
        sent_bytes: by this rank.
        total_s: how long they took, beside the rank's computation or not. It is how long the host waited where nobody
            notes their moments, or where that was longer because the thread had earlier exchanges to end.
        exposed_s: that the host stood waiting.
        late_s: of `exposed_s` while not all other ranks were there.
        ever_s: as `exposed_s`, from the start: `clear` leaves it.
        ordinal: of the newest, counted from 1 on; likewise.
        recorder, track: called with them, and the number by which it knows them.
    """

    count: int = 0
    sent_bytes: int = 0
    total_s: float = 0.0
    exposed_s: float = 0.0
    late_s: float = 0.0
    ever_s: float = 0.0
    ordinal: int = 0
    recorder: Recorder = field(default=SILENT, repr=False)
    track: int = 0

    def issue(self, count: int, sent_bytes: int, label: Label) -> None:
        """Count exchanges that have been asked for now."""
        self.count += count
        self.sent_bytes += sent_bytes
        self.ordinal += count
        self.recorder.issued(self.track, self.ordinal, label, sent_bytes)

    def set_recorder(self, recorder: Recorder, track: int) -> None:
        """Report them to `recorder` from now on, by the number `track`."""
        self.recorder, self.track = recorder, track

    def waited(self, start: float, end: float, moments: Moments | None = None) -> None:
        """The host has waited from `start` to `end` for an exchange with these moments, if they are noted."""
        self._stood(end - start)
        if moments is None or moments.begun is None or moments.done is None:
            self.total_s += end - start
            return
        self.total_s += max(moments.done - moments.begun, end - start)
        if moments.ready is not None:
            self.late_s += max(0.0, min(end, moments.ready) - max(start, moments.begun))

    @contextmanager
    def waiting(self, *, late: bool = False) -> Iterator[None]:
        """Count what is inside as a wait; if `late`, for the last rank, beside which what is moved takes no time."""
        start, ordinal = time.perf_counter(), self.ordinal
        self.recorder.waits(self.track, ordinal)
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self.recorder.waited(self.track, ordinal, start)
            self._stood(took)
            self.total_s += took
            self.late_s += took if late else 0.0

    def _stood(self, seconds: float) -> None:
        self.exposed_s += seconds
        self.ever_s += seconds

    def clear(self) -> None:
        """Count from zero; what is on its way still counts here."""
        self.count = self.sent_bytes = 0
        self.total_s = self.exposed_s = self.late_s = 0.0

    def add(self, other: Times) -> None:
        """Take in what has been counted elsewhere."""
        self.count += other.count
        self.sent_bytes += other.sent_bytes
        self.total_s += other.total_s
        self.exposed_s += other.exposed_s
        self.late_s += other.late_s
