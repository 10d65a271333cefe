"""What a rank tells the process that has started it, on a pipe: how far it has come, and how it failed.

Nothing here imports torch, so that a rank may still set what torch reads when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

__all__ = ["REPORT", "SIBLING_GRACE_S", "Failure", "LauncherPipe", "Milestone", "Reporter", "cause_of", "first_failure"]

REPORT = "TERRAZZO_REPORT"
"""The descriptor of the pipe, in the environment of a rank."""

SIBLING_GRACE_S = 8.0
"""Time for a rank to fail by itself before it is ended because another one failed."""


class Milestone(StrEnum):
    """How far a rank has come since it was started."""

    READY = "ready"
    """It heeds signals."""
    CLAIMED = "claimed"
    """The run's folders are its own."""
    TRAINING = "training"
    """The run is set up, and takes steps."""
    STEPPED = "stepped"
    """It has ended a step."""


@dataclass(frozen=True)
class Failure:
    """What ended a rank.

    Attributes:
        rank: its number.
        time_ns: when, on the monotonic clock that processes of a machine share.
        exit_code: of the rank.
        text: the message, or the traceback.
        cause: of a traceback the error in a line, see `cause_of`; empty where `text` is the message.
        lasts: whether ranks that are started again would end in the same way.
        lost: whether it is that another rank has ended or failed, which is then the cause.
    """

    rank: int
    time_ns: int
    exit_code: int
    text: str
    cause: str = ""
    lasts: bool = False
    lost: bool = False

    @property
    def why(self) -> str:
        """The error in a line."""
        return (self.cause or self.text).partition("\n")[0]


def cause_of(error: BaseException) -> str:
    """An error in a line: its class, and the first line of its message, which may have many (CUDA's gives advice)."""
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return next(line for line in lines if not line.startswith(" "))  # a SyntaxError begins with where it is


def first_failure(failures: Iterable[Failure | None]) -> Failure | None:
    """The earliest one, if any; of those that say a rank was lost, only where there are no others."""
    known = (one for one in failures if one is not None)
    return min(known, key=lambda failure: (failure.lost, failure.time_ns), default=None)


class Reporter:
    """Reports how a rank fares. This base class has only the user to tell."""

    def reach(self, milestone: Milestone) -> None:
        """This rank has reached a milestone."""

    def fail(self, failure: Failure, error: BaseException) -> None:
        """This rank has failed."""
        print(failure.text, file=sys.stderr)

    def leave(self, code: int) -> None:
        """This rank ends with an exit code."""


class LauncherPipe(Reporter):
    """Reports to the launcher, in lines of JSON. The launcher ends the ranks of a run that has failed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_inheritable(descriptor, False)

    def reach(self, milestone: Milestone) -> None:
        self._send({"reached": milestone})

    def fail(self, failure: Failure, error: BaseException) -> None:
        self._send({"failure": asdict(failure)})

    def leave(self, code: int) -> None:
        os.close(self._descriptor)

    def _send(self, value: object) -> None:
        left = memoryview(json.dumps(value).encode() + b"\n")
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except BrokenPipeError:
            return  # without a launcher this process will not be for long
