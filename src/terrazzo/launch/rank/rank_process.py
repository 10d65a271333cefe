"""One rank of a run as a process, and how it ends: the first failure is printed once, and no rank is left hanging."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from terrazzo.config import without_passwords
from terrazzo.errors import TerrazzoError, lost_a_rank, says_all
from terrazzo.exit_codes import FAILED, INTERRUPTED, PREEMPTED, reason_of
from terrazzo.launch.launcher_pipe import Failure, Milestone, Reporter, cause_of
from terrazzo.launch.rank.failure_reporters import reporter_of
from terrazzo.launch.stopping.preemption import leave_note
from terrazzo.messages import printable
from terrazzo.telemetry.log.exit_note import ExitNote, leave_exit, note_of_code

__all__ = ["RankProcess"]


class RankProcess:
    """This process as one rank of a run: what it reports, and how it ends.

    Args:
        rank: its number.

    Attributes:
        asked: whether this process was itself asked to stop, if it ends with `PREEMPTED`; to be set by whoever knows.
    """

    asked = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._reporter: Reporter = Reporter()
        self._reached: set[Milestone] = set()
        self._folder: Path | None = None  # of the run, once it is its own
        self._step: Callable[[], int | None] = lambda: None

    def run(self, work: Callable[[], int]) -> NoReturn:
        """Run `work`, and end the process with the exit code that it returns or its error has.

        The process ends without the interpreter's teardown: destructors of communication libraries may wait for ranks
        that are gone.
        """
        code = FAILED
        try:
            self._reporter = reporter_of(self._rank)
            code = work()
            if code == PREEMPTED and self.asked:
                leave_note()
            if self._rank == 0:
                self._note_exit(lambda step: note_of_code(code, step))
        except BaseException as error:
            code = _exit_code(error)
            self._fail(error, code)
        finally:
            for last in (lambda: self._reporter.leave(code), sys.stdout.flush, sys.stderr.flush):
                with contextlib.suppress(Exception):  # such as a pipe that nobody reads any more
                    last()
            os._exit(code)

    def reach(self, milestone: Milestone) -> None:
        """Report a milestone, once, to the process that started this rank."""
        if milestone not in self._reached:
            self._reached.add(milestone)
            self._reporter.reach(milestone)

    def note_end_in(self, folder: Path, step: Callable[[], int | None]) -> None:
        """From now on `folder` belongs to this run: its end is noted there, with what `step` returns then."""
        self._folder, self._step = folder, step
        self.reach(Milestone.CLAIMED)

    def note_interrupted(self) -> None:
        """Note that this process is about to end at once, as asked for. Without a launcher nobody else does."""
        self._note_exit(lambda step: note_of_code(INTERRUPTED, step))

    def _fail(self, error: BaseException, code: int) -> None:
        """Note and report the failure, on screen if reporting fails."""
        now, cause = time.monotonic_ns(), "" if _shows_message(error) else _shown(cause_of(error))
        failure = Failure(self._rank, now, code, _text(error), cause, _lasts(error), lost_a_rank(error))
        self._note_exit(lambda step: ExitNote(code, reason_of(code), cause or failure.text, self._rank, step))
        try:
            self._reporter.fail(failure, error)
        except BaseException:
            print(failure.text, file=sys.stderr)

    def _note_exit(self, note: Callable[[int | None], ExitNote]) -> None:
        if self._folder is not None:
            leave_exit(self._folder, note(self._step()))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, TerrazzoError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or FAILED  # a library's sys.exit(0): the run is not done
    return FAILED


def _lasts(error: BaseException) -> bool:
    """Whether a restart would not help, or is not wanted."""
    return error.lasts if isinstance(error, TerrazzoError) else isinstance(error, KeyboardInterrupt)


def _text(error: BaseException) -> str:
    """The message of an error that says all, the traceback of any other."""
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted."
    return _shown(f"Error: {error}" if says_all(error) else "".join(traceback.format_exception(error)).rstrip())


def _shows_message(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) or says_all(error)


def _shown(text: str) -> str:
    """`text` for a terminal: without passwords, and with control characters escaped, which may be a stranger's."""
    return printable(str(without_passwords(text)))
