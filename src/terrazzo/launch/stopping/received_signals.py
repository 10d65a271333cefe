"""Collects signals for a launcher, which passes the first one on to its ranks, and ends them at the next."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

__all__ = ["ASKING", "ReceivedSignals", "receive_by"]

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that ask for a stop; SIGHUP comes where a terminal is closed, or a connection to one is lost."""

_MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGQUIT)


def receive_by(handler: Callable[[int, FrameType | None], None], numbers: Iterable[int]) -> dict[int, Any]:
    """Have a handler called at these signals, but not those that `nohup` has us ignore; returns the former ones."""
    before = {number: signal.getsignal(number) for number in numbers}
    heeded = {
        number: former
        for number, former in before.items()
        if number not in _MAY_BE_IGNORED or former is not signal.SIG_IGN
    }
    for number in heeded:
        signal.signal(number, handler)
    return heeded


class ReceivedSignals:
    """Collects in `received` the signals that arrive from its creation until `restore`.

    A terminal that closes may say so twice, and after Ctrl-C: where something else has come, SIGHUP is none.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before = receive_by(self._receive, (*ASKING, signal.SIGQUIT))

    def restore(self) -> None:
        """Restore the signal handlers that were there before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not self.received:
            self.received.append(number)
