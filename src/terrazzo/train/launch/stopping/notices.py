"""What is said of a run that somebody stops, and who is told how its ranks have ended."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from terrazzo.telemetry.log.exit_note import ExitNote

__all__ = ["Notices", "say_now"]


@dataclass(frozen=True)
class Notices:
    """What is said of a run that somebody stops, and who is told how its ranks end.

    Attributes:
        stopping: said when it is asked to stop.
        cut_short: gives what is said where it is ended at once: what that costs.
        ended_unasked: said instead where no rank heeded signals yet, so that there was nobody to ask.
        stopping_early: said when it is asked to stop while it is set up, and may yet be refused.
        on_end: called with how ranks have ended, of a run whose folders are its own.
        on_restart: called before they are started again, of such a run.
    """

    stopping: str
    cut_short: Callable[[], str]
    ended_unasked: str = "Ended before training began: nothing is lost."
    stopping_early: str = ""
    on_end: Callable[[ExitNote], object] = lambda note: None
    on_restart: Callable[[], object] = lambda: None

    def on_request(self, *, trains: bool) -> str:
        """What is said when somebody asks for a stop; `trains`: the run is set up."""
        return self.stopping if trains or not self.stopping_early else self.stopping_early


def say_now(line: str) -> None:
    """A line on stderr, in place of a progress bar, which is drawn again below it. Another process may draw that."""
    with contextlib.suppress(OSError):
        print(f"{_CLEAR if sys.stderr.isatty() else ''}{line}", file=sys.stderr, flush=True)


_CLEAR = "\r\x1b[2K"  # the line with the bar, and what the terminal shows of Ctrl-C
