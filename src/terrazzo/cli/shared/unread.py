"""Whoever reads what is printed, and may leave at any time: `terrazzo ... | head`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from terrazzo.exit_codes import UNREAD
from terrazzo.files import to_nowhere

__all__ = ["ending_unread"]


@contextmanager
def ending_unread() -> Iterator[None]:
    """Inside, a write to standard output or error that nobody reads ends the process: no word, exit code `UNREAD`.

    As an exit and not as the signal itself: what is open is closed, and half-written files are removed.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Checked(stream)) for stream in streams)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()  # while it can still be answered: the interpreter would have words of its own
            sys.stderr.flush()
        finally:
            sys.stdout, sys.stderr = streams


class _Checked:
    """A text stream whose reader may go."""

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
        to_nowhere(stream)  # what waits in it would be tried again
        raise SystemExit(UNREAD) from None
