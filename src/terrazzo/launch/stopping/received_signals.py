"""Collects signals for a launcher, which passes the first one on to its ranks, and ends them at the next."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["ReceivedSignals"]


class ReceivedSignals:
    """Collects in `received` the signals that arrive from its creation until `restore`."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in (signal.SIGHUP, signal.SIGQUIT):
            if (before := signal.getsignal(number)) is not signal.SIG_IGN:  # as nohup has it
                self._before[number] = before
        for number in self._before:
            signal.signal(number, self._receive)

    def restore(self) -> None:
        """Restore the signal handlers that were there before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
