"""SIGTERM, Ctrl-C and a closed terminal as a request to finish the step, save, and leave with an exit code of its own.

It is enough if one rank gets the signal: the small all-reduce at the end of each step tells all ranks, so that they
save the same step. A second Ctrl-C leaves at once. Both are announced on screen, by the launcher, or by rank 0 if
another program has started the ranks.
"""

from __future__ import annotations

import os
import signal
import threading
from queue import SimpleQueue
from types import FrameType

import torch
import torch.distributed as dist

from terrazzo.exit_codes import INTERRUPTED
from terrazzo.launch.stopping.notices import Notices, say_now
from terrazzo.launch.stopping.received_signals import ASKING, receive_by

__all__ = ["StopRequest"]


class StopRequest:
    """Listens for the signals that are `ASKING` from its creation on; `agreed` is collective.

    Args:
        notices: what to say, if this rank announces signals. A thread does so, as a signal handler must not wait.

    Attributes:
        trains: whether the run is set up; to be set by whoever sets it up.
        requested: whether this rank was asked.
    """

    NBYTES = 8
    """Bytes that a rank sends in `agreed`."""

    trains = False
    _signals: SimpleQueue[int] | None = None

    def __init__(self, notices: Notices | None = None) -> None:
        self.requested = False
        self._interrupts = 0
        if notices is not None:
            self._signals = SimpleQueue()
            threading.Thread(target=self._say, args=(self._signals, notices), daemon=True).start()
        receive_by(self._receive, ASKING)

    def agreed(self, broken: bool) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, and whether any is `broken`. Every rank calls this once per step."""
        flags = torch.tensor([float(self.requested), float(broken)])  # on the CPU: waits for no device
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags[0]), bool(flags[1])

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
        if self._signals is not None:
            self._signals.put(self._interrupts)
        elif self._interrupts > 1:
            os._exit(INTERRUPTED)

    def _say(self, signals: SimpleQueue[int], notices: Notices) -> None:
        """Announce the first signal; at the second Ctrl-C say what that costs, and end this process."""
        signals.get()
        say_now(notices.asked(self.trains))
        while signals.get() < 2:
            pass
        try:
            say_now(notices.cut_short())
        finally:
            os._exit(INTERRUPTED)
