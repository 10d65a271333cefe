"""Ends a command whose output nobody reads any more: `terrazzo ... | head`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from terrazzo.exit_codes import UNREAD
from terrazzo.processes.standard_streams import to_nowhere

__all__ = ["ending_unread"]


@contextmanager
def ending_unread() -> Iterator[None]:
    """Within this context a write to a closed pipe on stdout or stderr silently ends the process with code `UNREAD`.

    It ends by SystemExit, not by the signal: open files are closed, and half-written ones removed.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Checked(stream)) for stream in streams)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()  # here and not at exit, where the interpreter would print an error
            sys.stderr.flush()
        finally:
            sys.stdout, sys.stderr = streams


class _Checked:
    """A text stream whose reader may leave."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _leaving(self._stream):
            return self._stream.write(text)

    def flush(self) -> None:
        with _leaving(self._stream):
            self._stream.flush()


@contextmanager
def _leaving(stream: TextIO) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        to_nowhere(stream)  # the interpreter would try to flush it again
        raise SystemExit(UNREAD) from None
