"""Reports a rank's failure: to its launcher, to the other ranks of the machine, or to the user.

Each failing rank reports what happened, and when on a clock that all processes of a machine share: to the launcher
through a pipe, or, if another program has started the ranks, to all ranks of the machine through a folder. So the cause
is printed instead of the connection errors that follow it, and ranks that are stuck with a dead one are ended.
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
from dataclasses import asdict
from pathlib import Path

from terrazzo.config import without_passwords
from terrazzo.errors import says_all
from terrazzo.exit_codes import FAILED, PREEMPTED
from terrazzo.files import replace_file
from terrazzo.launch.launcher_pipe import REPORT, SIBLING_GRACE_S, Failure, LauncherPipe, Reporter
from terrazzo.launch.rank.scratch_folder import ScratchFolder
from terrazzo.processes import tether
from terrazzo.telemetry.log.torchrun_report import report_to_torchrun, torchrun_file

__all__ = ["reporter_of"]

WATCH_EVERY_S = 0.5


def reporter_of(rank: int) -> Reporter:
    """The reporter for whatever has started this rank: Terrazzo's launcher, torchrun, Slurm, or nothing."""
    if report := os.environ.pop(REPORT, None):  # what this rank starts is not this rank
        return LauncherPipe(int(report))
    if (file := torchrun_file()) is not None:
        return SiblingReporter(rank, file.parent.parent)
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or os.environ.get("WORLD_SIZE") == "1":
        return Reporter()
    step = os.environ.get("SLURM_STEP_ID") or os.environ.get("SLURM_STEPID", "batch")
    restarts, port = os.environ.get("SLURM_RESTART_COUNT", "0"), os.environ.get("MASTER_PORT", "0")
    scratch = ScratchFolder(f"{job}-{step}-{restarts}-{port}")
    return SiblingReporter(rank, _folder_of_run(scratch.path, rank), scratch)


class SiblingReporter(Reporter):
    """Reports through files to the other ranks of this machine, if torchrun or Slurm has started them."""

    def __init__(self, rank: int, folder: Path, scratch: ScratchFolder | None = None) -> None:
        self._folder, self._scratch = folder, scratch
        threading.Thread(target=_watch, args=(folder, rank), daemon=True).start()

    def fail(self, failure: Failure, error: BaseException) -> None:
        with contextlib.suppress(OSError):  # such as a full disk: they hear of it from their connections
            replace_file(self._folder / f"failure.{failure.rank}.json", json.dumps(asdict(failure)), sync=False)
        is_first = _is_first(self._folder / "reported")
        if is_first:
            print(f"[rank {failure.rank}] {failure.text}", file=sys.stderr)
        if torchrun_file() is not None:  # Slurm has none
            _tell_torchrun(error, failure, is_first=is_first)

    def leave(self, code: int) -> None:
        if self._scratch is not None:
            self._scratch.leave(keep=code not in (0, PREEMPTED))  # others may yet have to find out


def _folder_of_run(shared: Path, rank: int) -> Path:
    """A folder for this run alone: a job step may start several runs, and files of a failed one stay.

    Every rank takes part in every run, so all count the same number of runs.
    """
    number = next(number for number in itertools.count(1) if _has_created(shared / f"rank.{rank}.{number}"))
    folder = shared / f"run.{number}"
    folder.mkdir(exist_ok=True)
    return folder


def _tell_torchrun(error: BaseException, failure: Failure, *, is_first: bool) -> None:
    """Give torchrun's own report the cause.

    For an error that the user can fix, only the rank that has printed it reports, without a traceback. The other ranks,
    which would report the same, wait for torchrun to end them.
    """
    if not isinstance(error, Exception):
        return
    if says_all(error) and not is_first:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(SIBLING_GRACE_S)
        return
    if says_all(error):
        report_to_torchrun(failure.text)
    else:  # as torch's own handler has it, which would write passwords
        report_to_torchrun(without_passwords(f"{type(error).__name__}: {error}"), failure.text)


def _has_created(path: Path) -> bool:
    """Whether this process is the first to create `path`."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _is_first(path: Path) -> bool:
    """Whether no rank has printed its failure yet; true if that cannot be found out: rather twice than never."""
    try:
        return _has_created(path)
    except OSError:
        return True


def _watch(folder: Path, rank: int) -> None:
    """End this process some seconds after another rank has failed, or at once when its launcher is gone."""
    while True:
        if os.getppid() != tether.PARENT:
            os._exit(FAILED)
        others = [path for path in folder.glob("failure.*.json") if path.name != f"failure.{rank}.json"]
        if others:
            time.sleep(SIBLING_GRACE_S)
            os._exit(FAILED)
        time.sleep(WATCH_EVERY_S)
