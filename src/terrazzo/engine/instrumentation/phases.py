"""Where in a step the host is, and for how long."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from terrazzo.engine.instrumentation.recorder import SILENT, Recorder
from terrazzo.engine.instrumentation.traffic import Traffic

__all__ = ["Phases"]


class Phases:
    """The phases of a training loop: each moment belongs to one, so that their seconds add up to the time gone by.

    The engine says when forward, backward, clipping and updates begin; what a loop does beside these it says itself.

    Args:
        traffic: whose waits are counted by phase.

    Attributes:
        seconds: by phase, of those that have ended.
        waited: of these, that the host stood waiting for other ranks.
        recorder: called as each begins.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.recorder: Recorder = SILENT
        self._now, self._since, self._waited_before, self._fixed = "other", time.perf_counter(), 0.0, False
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.waited: defaultdict[str, float] = defaultdict(float)

    def begin(self, phase: str) -> None:
        """The one before has ended; nothing changes inside of `during`."""
        if not self._fixed and phase != self._now:
            self._turn(phase)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what is inside as this phase, whatever the engine does there; then the one before goes on."""
        before, fixed = self._now, self._fixed
        self._turn(phase)
        self._fixed = True
        try:
            yield
        finally:
            self._fixed = fixed
            self._turn(before)

    def drain(self) -> tuple[dict[str, float], dict[str, float]]:
        """`seconds` and `waited` until now, and begins anew."""
        self._turn(self._now)
        seconds, waited = self.seconds, self.waited
        self.seconds, self.waited = defaultdict(float), defaultdict(float)
        return seconds, waited

    def _turn(self, phase: str) -> None:
        now, waited = time.perf_counter(), self._traffic.waited_ever_s
        if phase != self._now:
            self.recorder.phase(phase)
        self.seconds[self._now] += now - self._since
        self.waited[self._now] += waited - self._waited_before
        self._now, self._since, self._waited_before = phase, now, waited
