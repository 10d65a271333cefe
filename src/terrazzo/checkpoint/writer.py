"""The process that writes checkpoints for a rank: `python -m terrazzo.checkpoint.writer STAGING PARENT`.

It reads a job a line, answers a line for each, and ends with its parent or when there are no more.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable

from terrazzo.checkpoint.job import FAILED, Job, record_name
from terrazzo.checkpoint.shard import Part
from terrazzo.checkpoint.store import Draft
from terrazzo.errors import SaveFailed

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02


def main(staging: int, parent: int) -> None:
    """Serve jobs from standard input until it ends."""
    _die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the run, which ends its saves by itself
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        problem = None
        try:
            _serve(Job.from_json(line), staging)
        except Exception as error:
            known = isinstance(error, SaveFailed)
            problem = str(error) if known else f"{type(error).__name__}: {error}."
        print(json.dumps({"problem": problem}), flush=True)


def _serve(job: Job, staging: int) -> None:
    draft = job.draft()
    try:
        _write(job, draft, staging)
        if job.rank == 0:
            records = [record_name(rank) for rank in range(job.world_size)]
            _await(draft, lambda: all(map(draft.has_note, records)), "another rank's part")
            _heed(draft)
            job.conclude(draft)
    except Exception as error:
        job.fail(draft, f"{type(error).__name__}: {error}.")
        raise
    if job.rank > 0:
        _await(draft, draft.committed, "the commit")


def _write(job: Job, draft: Draft, staging: int) -> None:
    size_bytes = max((part.offset + part.count_bytes for part in job.parts), default=0)
    memory = memoryview(mmap.mmap(staging, size_bytes, prot=mmap.PROT_READ)) if size_bytes else memoryview(b"")

    def data(part: Part) -> memoryview:
        return memory[part.offset : part.offset + part.count_bytes]

    job.write(draft, data)


def _await(draft: Draft, done: Callable[[], bool], what: str) -> None:
    """Wait for other ranks; raises `SaveFailed` when one has failed, or says nothing for too long."""
    deadline = time.monotonic() + draft.patience_s
    while not done():
        _heed(draft)
        if not draft.alive() and not done():
            raise SaveFailed("the process that began it is gone.")
        if time.monotonic() > deadline:
            raise SaveFailed(f"{what} did not come within {draft.patience_s:.0f} s.")
        time.sleep(_POLL_S)


def _heed(draft: Draft) -> None:
    """Raises `SaveFailed` when another rank has failed."""
    if draft.has_note(FAILED):
        raise SaveFailed(draft.noted(FAILED).decode())


def _die_with(parent: int) -> None:
    """Be killed when the parent ends: nobody would hear of what is written then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
