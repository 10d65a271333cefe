"""SIGTERM and Ctrl-C as a request: finish the step, save, leave with a code of its own.

One rank that gets the signal is enough: the request travels to all ranks in the small reduction at the end of each
step, so that every rank saves the same step. A second Ctrl-C leaves at once. Both are said on screen as they come, by
the launcher of ranks, or by rank 0 where others have started it.
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
from terrazzo.train.launch.stopping.notices import Notices, say_now

__all__ = ["StopRequest"]


class StopRequest:
    """Listens for SIGTERM and SIGINT from its creation on; `agreed()` is collective.

    With `notices` they are said by a thread: a handler runs in the middle of anything, and must not wait.

    Attributes:
        trains: the run is set up, and takes steps; to be set by whoever has set it up.
    """

    NBYTES = 8
    """Bytes that a rank sends in `agreed`."""

    trains = False
    _signals: SimpleQueue[int] | None = None

    def __init__(self, notices: Notices | None = None) -> None:
        self._requested = False
        self._interrupts = 0
        if notices is not None:
            self._signals = SimpleQueue()
            threading.Thread(target=self._say, args=(self._signals, notices), daemon=True).start()
        signal.signal(signal.SIGTERM, self._receive)
        signal.signal(signal.SIGINT, self._receive)

    def agreed(self, broken: bool) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, and whether any is `broken`. Every rank calls this once per step."""
        flags = torch.tensor([float(self._requested), float(broken)])  # on the CPU: waits for no device
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags[0]), bool(flags[1])

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
        if self._signals is not None:
            self._signals.put(self._interrupts)
        elif self._interrupts > 1:
            os._exit(INTERRUPTED)

    def _say(self, signals: SimpleQueue[int], notices: Notices) -> None:
        """What the first signal asks for; at the second Ctrl-C what it costs, and the end of this process."""
        signals.get()
        say_now(notices.on_request(trains=self.trains))
        while signals.get() < 2:
            pass
        try:
            say_now(notices.cut_short())
        finally:
            os._exit(INTERRUPTED)
