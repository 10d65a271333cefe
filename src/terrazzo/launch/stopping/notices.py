"""What is said when a run is stopped, and what to call when its ranks have ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from terrazzo.processes.standard_streams import say_on_stderr
from terrazzo.telemetry.log.exit_note import ExitNote

__all__ = ["ENDED_BEFORE_SCRIPT", "ENDED_BEFORE_TRAINING", "Notices", "say_now"]

ENDED_BEFORE_TRAINING = "Ended before training began: nothing is lost."
ENDED_BEFORE_SCRIPT = "Ended before the script began."


@dataclass(frozen=True)
class Notices:
    """What is said when a run is stopped, and what to call when its ranks have ended.

    Attributes:
        asked: returns what is said when the run is asked to stop; is given whether it trains: before, it may still
            be refused.
        cut_short: returns what is said when the run is ended at once: what is lost.
        ended_unasked: is said instead if no rank handled signals yet, so that none could be asked.
        on_end: is called with how ranks have ended, if the run has claimed its folders.
        on_restart: is called before such ranks are started again.
    """

    asked: Callable[[bool], str]
    cut_short: Callable[[], str]
    ended_unasked: str = ENDED_BEFORE_TRAINING
    on_end: Callable[[ExitNote], object] = lambda note: None
    on_restart: Callable[[], object] = lambda: None


def say_now(line: str) -> None:
    """Print a line on stderr over a progress bar, which is drawn again below it, perhaps by another process."""
    say_on_stderr(f"{_CLEAR if sys.stderr.isatty() else ''}{line}")


_CLEAR = "\r\x1b[2K"  # the line with the bar, and what the terminal shows of Ctrl-C
