"""Ends a command whose output cannot be written: nobody reads any more (`terrazzo ... | head`), or a disk is full."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from terrazzo.exit_codes import UNREAD
from terrazzo.processes.standard_streams import say_on_stderr, to_nowhere

__all__ = ["ending_unread"]


@contextmanager
def ending_unread(failed: int) -> Iterator[None]:
    """Within this context a write to stdout or stderr that fails ends the process.

    To a closed pipe silently, with code `UNREAD`; otherwise with a line, and with `failed`. It ends by SystemExit, not
    by a signal: open files are closed, and half-written ones removed.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Checked(stream, failed)) for stream in streams)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()  # here and not at exit, where the interpreter would print an error
            sys.stderr.flush()
        finally:
            sys.stdout, sys.stderr = streams


class _Checked:
    """A text stream that may not be writable."""

    def __init__(self, stream: TextIO, failed: int) -> None:
        self._stream, self._failed = stream, failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._leaving():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._leaving():
            self._stream.flush()

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            to_nowhere(self._stream)  # the interpreter would try to flush it again
            if isinstance(error, BrokenPipeError):
                raise SystemExit(UNREAD) from None
            say_on_stderr(f"Error: {self._stream.name.strip('<>')} cannot be written: {error.strerror or error}.")
            raise SystemExit(self._failed) from None
