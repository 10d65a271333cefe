"""One rank of a run as a process, and how it ends: who failed first is said once, and nobody is left hanging."""

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
from terrazzo.errors import TerrazzoError
from terrazzo.exit_codes import FAILED, INTERRUPTED, reason_of
from terrazzo.telemetry.log.exit_note import ExitNote, leave_exit, note_of_code
from terrazzo.train.launch.launcher_pipe import Failure, Milestone, Reporter
from terrazzo.train.launch.rank.failure_reporters import reporter_of, says_all

__all__ = ["RankProcess"]


class RankProcess:
    """This process as one rank of a run: what it tells whoever looks after it, and how it ends.

    Args:
        rank: its number.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._reporter: Reporter = Reporter()
        self._reached: set[Milestone] = set()
        self._folder: Path | None = None  # of the run, once it is its own
        self._step: Callable[[], int | None] = lambda: None

    def run(self, work: Callable[[], int]) -> NoReturn:
        """Run `work` and end the process with the exit code that it returns, or that its error has.

        The process ends without the interpreter's usual teardown after a failure, since destructors of communication
        libraries wait for ranks that may already be gone.
        """
        code = FAILED
        try:
            self._reporter = reporter_of(self._rank)
            code = work()
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
        """Tell the process that started this rank, once, that it has come so far."""
        if milestone not in self._reached:
            self._reached.add(milestone)
            self._reporter.reach(milestone)

    def note_end_in(self, folder: Path, step: Callable[[], int | None]) -> None:
        """From now on `folder` is this run's own: how it ends is noted there, with what `step` tells then."""
        self._folder, self._step = folder, step
        self.reach(Milestone.CLAIMED)

    def note_interrupted(self) -> None:
        """Note that this process is about to end at once, as somebody has asked for, where nobody else can."""
        self._note_exit(lambda step: note_of_code(INTERRUPTED, step))

    def _fail(self, error: BaseException, code: int) -> None:
        """Note it, and report it, on screen where that fails: this process ends here, and nobody else can say it."""
        failure = Failure(self._rank, time.monotonic_ns(), code, _text(error), _lasts(error))
        cause = _cause(error)
        self._note_exit(lambda step: ExitNote(code, reason_of(code), cause, self._rank, step))
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
    """Whether no restart mends it, or nobody wants one after it."""
    return error.lasts if isinstance(error, TerrazzoError) else isinstance(error, KeyboardInterrupt)


def _text(error: BaseException) -> str:
    """A paragraph for what the user can mend, the whole traceback for everything else; no passwords."""
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted."
    text = f"Error: {error}" if says_all(error) else "".join(traceback.format_exception(error)).rstrip()
    return str(without_passwords(text))


def _cause(error: BaseException) -> str:
    """Without a traceback."""
    return _text(error) if says_all(error) else _text(error).splitlines()[-1]
