"""What a process says on its standard streams, where nobody may be reading them any more."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO

__all__ = ["say_on_stderr", "to_nowhere"]


def say_on_stderr(text: str) -> None:
    """Print on stderr. Where that cannot be written to, nothing is said, and what was decided is done all the same."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def to_nowhere(stream: IO[str]) -> None:
    """Discard what is in the buffer of a stream and what is written to it from now on, if it has a descriptor."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
