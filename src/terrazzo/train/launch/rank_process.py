"""One rank of a run as a process, and how it ends: who failed first is said once, and nobody is left hanging.

Each failing rank tells what happened, with a clock that all processes of a machine share: its launcher, through a pipe,
or where others have started it, all ranks of the machine, through a folder. Whoever reports then names the cause
instead of the connection errors that follow it, and those that are stuck with a rank that is gone are ended.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn, Protocol

from terrazzo import tether
from terrazzo.config import without_passwords
from terrazzo.errors import BadInput, Corrupted, Diverged, FolderLost, Misuse, SaveFailed, SwapFailed, TerrazzoError
from terrazzo.exit_codes import FAILED, INTERRUPTED, PREEMPTED, reason_of
from terrazzo.files import replace_file
from terrazzo.telemetry.log.exit_note import ExitNote, leave_exit, note_of_code
from terrazzo.train.launch.launcher_pipe import REPORT, Failure, LauncherPipe
from terrazzo.train.launch.preemption import leave_note
from terrazzo.train.launch.scratch_folder import ScratchFolder

__all__ = ["SIBLING_GRACE_S", "RankProcess"]

_MENDABLE = BadInput | Diverged | SaveFailed | SwapFailed  # one paragraph says it all
_LASTING = (BadInput, Misuse, Diverged, Corrupted, FolderLost, KeyboardInterrupt)
"""What no restart mends, or nobody wants one after."""

SIBLING_GRACE_S = 8.0  # time for a rank to fail by itself before it is ended because another one failed
WATCH_EVERY_S = 0.5


class _Reporter(Protocol):
    def begun(self) -> None:
        """This rank heeds signals from now on."""

    def claimed(self) -> None:
        """The run's folders are its own."""

    def training(self) -> None:
        """The run is set up, and takes steps."""

    def fail(self, failure: Failure, error: BaseException) -> None:
        """This rank ends so."""

    def leave(self, code: int) -> None:
        """This rank ends with an exit code."""


class _SiblingReporter:
    """Files for the other ranks of this machine, where torchrun or Slurm has started them."""

    def __init__(self, rank: int, folder: Path, scratch: ScratchFolder | None = None) -> None:
        self._folder, self._scratch = folder, scratch
        threading.Thread(target=_watch, args=(folder, rank), daemon=True).start()

    def begun(self) -> None:
        """Signals are sent by whoever started this rank."""

    def claimed(self) -> None:
        pass

    def training(self) -> None:
        pass

    def fail(self, failure: Failure, error: BaseException) -> None:
        with contextlib.suppress(OSError):  # such as a full disk: they hear of it from their connections
            replace_file(self._folder / f"failure.{failure.rank}.json", json.dumps(asdict(failure)), sync=False)
        is_first = _is_first(self._folder / "reported")
        if is_first:
            print(f"[rank {failure.rank}] {failure.text}", file=sys.stderr)
        if (report := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:  # Slurm has none
            _report_to_torchrun(Path(report), error, failure, is_first=is_first)

    def leave(self, code: int) -> None:
        if code == PREEMPTED:
            leave_note()
        if self._scratch is not None:
            self._scratch.leave(keep=code not in (0, PREEMPTED))  # others may yet have to find out


class _ScreenReporter:
    """Nobody but the user to tell."""

    def begun(self) -> None:
        pass

    def claimed(self) -> None:
        pass

    def training(self) -> None:
        pass

    def fail(self, failure: Failure, error: BaseException) -> None:
        print(failure.text, file=sys.stderr)

    def leave(self, code: int) -> None:
        pass


class RankProcess:
    """This process as one rank of a run: what it tells whoever looks after it, and how it ends.

    Args:
        rank: its number.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._reporter: _Reporter = _ScreenReporter()
        self._folder: Path | None = None  # of the run, once it is its own
        self._step: Callable[[], int | None] = lambda: None

    def run(self, work: Callable[[], int]) -> NoReturn:
        """Run `work` and end the process with the exit code that it returns, or that its error has.

        The process ends without the interpreter's usual teardown after a failure, since destructors of communication
        libraries wait for ranks that may already be gone.
        """
        code = FAILED
        try:
            self._reporter = _reporter_of(self._rank)
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

    def announce_ready(self) -> None:
        """Tell the process that started this rank that it heeds signals now."""
        self._reporter.begun()

    def announce_claim(self, folder: Path, step: Callable[[], int | None]) -> None:
        """From now on `folder` is this run's own: how it ends is noted there, with what `step` tells then."""
        self._folder, self._step = folder, step
        self._reporter.claimed()

    def announce_training(self) -> None:
        """Tell the process that started this rank that the run is set up, and takes steps."""
        self._reporter.training()

    def note_interrupted(self) -> None:
        """Note that this process is about to end at once, as somebody has asked for, where nobody else can."""
        self._note_exit(lambda step: note_of_code(INTERRUPTED, step))

    def _fail(self, error: BaseException, code: int) -> None:
        """Note it, and report it, on screen where that fails: this process ends here, and nobody else can say it."""
        failure = Failure(self._rank, time.monotonic_ns(), code, _text(error), isinstance(error, _LASTING))
        cause = _cause(error)
        self._note_exit(lambda step: ExitNote(code, reason_of(code), cause, self._rank, step))
        try:
            self._reporter.fail(failure, error)
        except BaseException:
            print(failure.text, file=sys.stderr)

    def _note_exit(self, note: Callable[[int | None], ExitNote]) -> None:
        if self._folder is not None:
            leave_exit(self._folder, note(self._step()))


def _reporter_of(rank: int) -> _Reporter:
    if report := os.environ.pop(REPORT, None):  # what this rank starts is not this rank
        return LauncherPipe(int(report))
    if elastic := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # .../attempt_0/LOCAL_RANK/error.json
        return _SiblingReporter(rank, Path(elastic).parent.parent)
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or os.environ.get("WORLD_SIZE") == "1":
        return _ScreenReporter()
    step = os.environ.get("SLURM_STEP_ID") or os.environ.get("SLURM_STEPID", "batch")
    restarts, port = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ.get("MASTER_PORT", "0")
    scratch = ScratchFolder(f"{job}-{step}-{restarts}-{port}")
    return _SiblingReporter(rank, _folder_of_run(scratch.path, rank), scratch)


def _folder_of_run(shared: Path, rank: int) -> Path:
    """A folder for this run alone: the script of a job step may start one after another, and what failed stays.

    Every rank takes part in every run, so that the number of its runs so far is the same for all.
    """
    number = next(number for number in itertools.count(1) if _claim(shared / f"rank.{rank}.{number}"))
    folder = shared / f"run.{number}"
    folder.mkdir(exist_ok=True)
    return folder


def _report_to_torchrun(report: Path, error: BaseException, failure: Failure, *, is_first: bool) -> None:
    """Give torchrun's own report the cause.

    Of what the user can mend it gets the paragraph from the rank that said it on screen, and no tracebacks: the other
    ranks, which say the same, wait for torchrun to end them.
    """
    if not isinstance(error, Exception):
        return
    if isinstance(error, _MENDABLE) and not is_first:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(SIBLING_GRACE_S)
        return
    message, more = failure.text, {"timestamp": str(int(time.time()))}
    if not isinstance(error, _MENDABLE):  # as torch's own handler has it, which would write passwords
        message, more["py_callstack"] = without_passwords(f"{type(error).__name__}: {error}"), failure.text
    with contextlib.suppress(OSError):
        report.write_text(json.dumps({"message": {"message": message, "extraInfo": more}}))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, TerrazzoError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or FAILED  # a library's sys.exit(0): the run is not done
    return FAILED


def _text(error: BaseException) -> str:
    """A paragraph for what the user can mend, the whole traceback for everything else; no passwords."""
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted."
    text = f"Error: {error}" if isinstance(error, _MENDABLE) else "".join(traceback.format_exception(error)).rstrip()
    return str(without_passwords(text))


def _cause(error: BaseException) -> str:
    """Without a traceback."""
    return _text(error) if isinstance(error, _MENDABLE) else _text(error).splitlines()[-1]


def _claim(path: Path) -> bool:
    """Whether this process is the first to create `path`."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _is_first(path: Path) -> bool:
    """Whether nobody has said anything yet, for all that this process can find out: rather twice than never."""
    try:
        return _claim(path)
    except OSError:
        return True


def _watch(folder: Path, rank: int) -> None:
    """End this process some seconds after another rank failed, or at once when its launcher is gone."""
    while True:
        if os.getppid() != tether.PARENT:
            os._exit(FAILED)
        others = [path for path in folder.glob("failure.*.json") if path.name != f"failure.{rank}.json"]
        if others:
            time.sleep(SIBLING_GRACE_S)
            os._exit(FAILED)
        time.sleep(WATCH_EVERY_S)
