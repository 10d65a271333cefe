"""SIGTERM and Ctrl-C as a request: finish the step, save, leave with a code of its own.

One rank that gets the signal is enough: the request travels to all ranks in the small reduction at the end of each
step, so that every rank saves the same step. A second Ctrl-C leaves at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

import torch
import torch.distributed as dist

from terrazzo.train.launch.telling import INTERRUPTED

__all__ = ["StopRequest"]


class StopRequest:
    """Listens for SIGTERM and SIGINT from its creation on; `agreed()` is collective."""

    def __init__(self) -> None:
        self._requested = False
        self._interrupts = 0
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
        if self._interrupts > 1:
            os._exit(INTERRUPTED)
