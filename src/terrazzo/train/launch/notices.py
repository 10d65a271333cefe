"""How a run has ended, as a value, and the words for whoever stops one."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from terrazzo.config import without_passwords
from terrazzo.exit_codes import reason_of
from terrazzo.telemetry.log.exit_note import ExitNote

__all__ = ["Notices", "RunEnd", "say_now"]


class RunEnd(NamedTuple):
    """How ranks that were started together have ended.

    Attributes:
        code: the exit code that says so.
        why: what failed first, in a line; empty where nothing did.
        lasts: it would end so again, whoever starts it.
        unbegun: the rank that failed first, where it had not ended a step yet.
        rank: that failed first.
        step: that this one had ended last, where that is known.
        reason: as in an `ExitNote`; empty for that of the code.
    """

    code: int
    why: str = ""
    lasts: bool = True
    unbegun: int | None = None
    rank: int | None = None
    step: int | None = None
    reason: str = ""

    @property
    def note(self) -> ExitNote:
        """What their launcher has to say of it."""
        cause = self.why or (f"ended by {signal.Signals(self.code - 128).name}" if self.code > 128 else "unknown")
        reason = self.reason or reason_of(self.code)
        return ExitNote(self.code, reason, str(without_passwords(cause)), self.rank, self.step)


@dataclass(frozen=True)
class Notices:
    """What is said of a run that somebody stops, and who is told how its ranks end.

    Attributes:
        stopping: said when it is asked to stop.
        cut_short: gives what is said where it is ended at once: what that costs.
        unbegun: said instead where no rank had begun, so that there was nobody to ask.
        stopping_early: said when it is asked to stop while it is set up, and may yet be refused.
        on_end: called with how ranks have ended, of a run whose folders are its own.
        on_restart: called before they are started again, of such a run.
    """

    stopping: str
    cut_short: Callable[[], str]
    unbegun: str = "Ended before training began: nothing is lost."
    stopping_early: str = ""
    on_end: Callable[[RunEnd], object] = lambda end: None
    on_restart: Callable[[], object] = lambda: None

    def on_request(self, *, trains: bool) -> str:
        """What is said when somebody asks for a stop; `trains`: the run is set up."""
        return self.stopping if trains or not self.stopping_early else self.stopping_early


def say_now(line: str) -> None:
    """A line on stderr, in place of a progress bar, which is drawn again below it. Another process may draw that."""
    with contextlib.suppress(OSError):
        print(f"{_CLEAR if sys.stderr.isatty() else ''}{line}", file=sys.stderr, flush=True)


_CLEAR = "\r\x1b[2K"  # the line with the bar, and what the terminal shows of Ctrl-C
