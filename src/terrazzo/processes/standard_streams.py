"""What a process says on its standard streams, where nobody may be reading them any more."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import IO

__all__ = ["open_missing", "say_on_stderr", "to_nowhere"]

_FULL_S = 1.0
"""Seconds after which nobody reads a pipe that is full."""


def open_missing() -> None:
    """Have standard streams that whoever started this process has closed lead nowhere, for it and all that it starts.

    Else they are None, and the next file that is opened has their descriptor.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere == descriptor:  # else something is open there by now, which stays
            os.set_inheritable(nowhere, True)
        setattr(sys, name, os.fdopen(nowhere, mode, closefd=False))


def say_on_stderr(text: str) -> None:
    """Print on stderr. Where that cannot be written to, nothing is said, and what was decided is done all the same.

    So it is with a pipe that is full, and that nobody reads: a write to it would wait, and heed no signal.
    """
    with contextlib.suppress(OSError):
        if sys.stderr is not None and _is_writable(sys.stderr):
            print(text, file=sys.stderr, flush=True)


def _is_writable(stream: IO[str]) -> bool:
    """Whether there is room for a write, or will be soon."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # in memory
        return True
    return bool(select.select([], [descriptor], [], _FULL_S)[1])


def to_nowhere(stream: IO[str]) -> None:
    """Discard what is in the buffer of a stream and what is written to it from now on, if it has a descriptor."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
