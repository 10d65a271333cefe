"""SIGTERM and Ctrl-C as a request: finish the step, save, leave with a code of its own.

One rank that gets the signal is enough: the request travels to all ranks in the small reduction at the end of each
step, so that every rank saves the same step. A second Ctrl-C leaves at once. Both are said on screen as they come, by
the launcher of ranks, or by rank 0 where others have started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType

import torch
import torch.distributed as dist

from terrazzo.exit_codes import INTERRUPTED
from terrazzo.train.launch.again import Ended

__all__ = ["Notices", "StopRequest", "say_now"]


@dataclass(frozen=True)
class Notices:
    """What is said of a run that somebody stops: when it is `asked` to, and, if he does not wait, what that costs.

    `unbegun` is said where no rank had begun, so that there was nobody to ask. `ended` hears how ranks have ended whose
    folders were their own.
    """

    asked: str
    cut_short: Callable[[], str]
    unbegun: str = "Ended before training began: nothing is lost."
    ended: Callable[[Ended], object] = lambda ended: None


def say_now(line: str) -> None:
    """A line on stderr, in place of a progress bar, which is drawn again below it. Another process may draw that."""
    with contextlib.suppress(OSError):
        print(f"{_CLEAR if sys.stderr.isatty() else ''}{line}", file=sys.stderr, flush=True)


_CLEAR = "\r\x1b[2K"  # the line with the bar, and what the terminal shows of Ctrl-C


class StopRequest:
    """Listens for SIGTERM and SIGINT from its creation on; `agreed()` is collective.

    With `notices` they are said by a thread: a handler runs in the middle of anything, and must not wait.
    """

    NBYTES = 8
    """That `agreed` sends."""

    _heard: SimpleQueue[int] | None = None

    def __init__(self, notices: Notices | None = None) -> None:
        self._requested = False
        self._interrupts = 0
        if notices is not None:
            self._heard = SimpleQueue()
            threading.Thread(target=_say, args=(self._heard, notices), daemon=True).start()
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
        if self._heard is not None:
            self._heard.put(self._interrupts)
        elif self._interrupts > 1:
            os._exit(INTERRUPTED)


def _say(heard: SimpleQueue[int], notices: Notices) -> None:
    """What the first signal asks for; at the second Ctrl-C what it costs, and the end of this process."""
    heard.get()
    say_now(notices.asked)
    while heard.get() < 2:
        pass
    try:
        say_now(notices.cut_short())
    finally:
        os._exit(INTERRUPTED)
