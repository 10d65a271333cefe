"""How a failing rank ends the run: who failed first is recorded, said once, and nobody is left hanging.

Each failing rank writes what happened, with a clock that all processes of a machine share, into a folder that they all
see. Whoever reports, the launching process or the first failing rank, then names the cause instead of the connection
errors that follow it. Every rank also watches that folder, so that one which is stuck in a collective with a rank that
no longer exists ends as well.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from terrazzo.errors import BadInput, SwapFailed

__all__ = [
    "BAD_INPUT",
    "FAILED",
    "PREEMPTED",
    "SHARED_FOLDER",
    "Failure",
    "first_failure",
    "run_rank",
    "shared_folder",
]

FAILED = 1
BAD_INPUT = 2
PREEMPTED = 75  # EX_TEMPFAIL: asked to stop, saved, start again to continue

SHARED_FOLDER = "TERRAZZO_SHARED_FOLDER"  # set for ranks that this command started itself
SIBLING_GRACE_S = 8.0  # time for a rank to fail by itself before it is ended because another one failed
WATCH_EVERY_S = 0.5


@dataclass(frozen=True)
class Failure:
    """What ended a rank. `time_ns` is monotonic and comparable between processes of one machine."""

    rank: int
    time_ns: int
    exit_code: int
    text: str


def shared_folder() -> Path | None:
    """The folder that all ranks of this machine see for this run, if something that launched them provides one."""
    if own := os.environ.get(SHARED_FOLDER):
        return Path(own)
    if elastic := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # .../attempt_0/LOCAL_RANK/error.json
        return Path(elastic).parent.parent
    if job := os.environ.get("SLURM_JOB_ID"):
        step = os.environ.get("SLURM_STEP_ID", "batch")
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        return Path(tempfile.gettempdir()) / f"terrazzo-{os.getuid()}-{job}-{step}-{restart}"
    return None


def run_rank(rank: int, work: Callable[[], int]) -> NoReturn:
    """Run `work` as one rank of a run and end the process with its exit code.

    The process ends without the interpreter's usual teardown after a failure, since destructors of communication
    libraries wait for ranks that may already be gone.
    """
    folder = shared_folder()
    if folder is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        threading.Thread(target=_watch, args=(folder, rank), daemon=True).start()
    try:
        code = work()
    except BaseException as error:
        code = _fail(rank, error, folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def first_failure(folder: Path) -> Failure | None:
    """The earliest failure recorded in `folder`, if any."""
    found = [Failure(**json.loads(path.read_text())) for path in folder.glob("failure.*.json")]
    return min(found, key=lambda failure: failure.time_ns, default=None)


def _fail(rank: int, error: BaseException, folder: Path | None) -> int:
    failure = Failure(rank, time.monotonic_ns(), _exit_code(error), _text(error))
    if folder is None:
        print(failure.text, file=sys.stderr)
        return failure.exit_code
    part = folder / f"failure.{rank}.part"
    part.write_text(json.dumps(asdict(failure)))
    part.rename(part.with_suffix(".json"))
    if SHARED_FOLDER not in os.environ:  # else our launcher reports, and a half-written file would disturb its agent
        if isinstance(error, Exception):
            ErrorHandler().record_exception(error)  # torchrun's own report then shows the cause too
        if _claim(folder / "reported"):
            print(f"[rank {rank}] {failure.text}", file=sys.stderr)
    return failure.exit_code


def _exit_code(error: BaseException) -> int:
    if isinstance(error, BadInput):
        return BAD_INPUT
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return FAILED


def _text(error: BaseException) -> str:
    """A paragraph for what the user can mend, the whole traceback for everything else."""
    return (
        str(error) if isinstance(error, BadInput | SwapFailed) else "".join(traceback.format_exception(error)).rstrip()
    )


def _claim(path: Path) -> bool:
    """Whether this process is the first to create `path`."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _watch(folder: Path, rank: int) -> None:
    """End this process some seconds after another rank failed, or at once when its launcher is gone."""
    parent = os.getppid()
    while True:
        time.sleep(WATCH_EVERY_S)
        if os.getppid() != parent:
            os._exit(FAILED)
        others = [path for path in folder.glob("failure.*.json") if path.name != f"failure.{rank}.json"]
        if others:
            time.sleep(SIBLING_GRACE_S)
            os._exit(FAILED)
