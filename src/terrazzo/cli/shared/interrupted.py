"""Ends a verb with a line where Ctrl-C comes before it has started what heeds signals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from terrazzo.exit_codes import INTERRUPTED
from terrazzo.processes.standard_streams import say_on_stderr

__all__ = ["ending_interrupted"]


@contextmanager
def ending_interrupted(said: str) -> Iterator[None]:
    """Within this context Ctrl-C says so, and ends the process with code `INTERRUPTED`."""
    try:
        yield
    except KeyboardInterrupt:
        say_on_stderr(said)
        raise typer.Exit(INTERRUPTED) from None
