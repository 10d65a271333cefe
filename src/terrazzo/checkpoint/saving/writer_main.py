"""The process that writes checkpoints for a rank: `python -m terrazzo.checkpoint.saving.writer_main STAGING PATIENCE`.

It reads a job a line, answers a line for each, and ends when there are no more, or with its parent, which ties it.
"""

from __future__ import annotations

import json
import mmap
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

from terrazzo.checkpoint.format.rank_layout import FileEntry
from terrazzo.checkpoint.saving.job import FAILED, SaveJob, record_name
from terrazzo.checkpoint.storage.store import CheckpointDraft
from terrazzo.errors import SaveFailed

__all__ = ["main"]

_POLL_S = 0.02


def main(staging: int, patience_s: float) -> None:
    """Serve jobs from standard input until it ends; `patience_s` is how long one rank's part waits for another's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the run, which ends its saves by itself
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        problem = None
        try:
            _serve(SaveJob.from_json(line), staging, patience_s)
        except Exception as error:
            known = isinstance(error, SaveFailed)
            problem = str(error) if known else f"{type(error).__name__}: {error}."
        print(json.dumps({"problem": problem}), flush=True)


def _serve(job: SaveJob, staging: int, patience_s: float) -> None:
    draft, beat = job.draft(), _Beat(min(0.5, patience_s / 16))
    try:
        _write(job, draft, staging, beat)
        deadline = time.monotonic() + patience_s
        if job.rank == 0:
            for rank in range(job.world_size):
                there = partial(draft.has_note, record_name(rank))
                _await(draft, there, deadline, f"the part of rank {rank} did not come within {patience_s:.0f} s", beat)
            _heed(draft)
            job.conclude(draft)
    except Exception as error:
        job.fail(draft, str(error) if isinstance(error, SaveFailed) else f"{type(error).__name__}: {error}.")
        raise
    if job.rank > 0:
        _await(draft, draft.committed, deadline, f"rank 0 did not commit within {patience_s:.0f} s", beat)


def _write(job: SaveJob, draft: CheckpointDraft, staging: int, beat: Callable[[], None]) -> None:
    size_bytes = max((entry.offset + entry.count_bytes for entry in job.entries), default=0)
    memory = memoryview(mmap.mmap(staging, size_bytes, prot=mmap.PROT_READ)) if size_bytes else memoryview(b"")

    def entry_bytes(entry: FileEntry) -> memoryview:
        return memory[entry.offset : entry.offset + entry.count_bytes]

    job.write(draft, entry_bytes, beat)


class _Beat:
    """Tells the rank that something moves, every so often."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._last = every_s, time.monotonic()

    def __call__(self) -> None:
        if (now := time.monotonic()) > self._last + self._every_s:
            self._last = now
            print("{}", flush=True)


def _await(
    draft: CheckpointDraft, done: Callable[[], bool], deadline: float, late: str, beat: Callable[[], None]
) -> None:
    """Wait for other ranks; raises `SaveFailed` when one has failed, or says nothing for too long."""
    while not done():
        _heed(draft)
        if not draft.alive() and not done():
            raise SaveFailed("the process that began it is gone.")
        if time.monotonic() > deadline:
            raise SaveFailed(f"{late} (launch.timeout_s, or patience_s of a Saver).")
        beat()
        time.sleep(_POLL_S)


def _heed(draft: CheckpointDraft) -> None:
    """Raises `SaveFailed` when another rank has failed."""
    if draft.has_note(FAILED):
        raise SaveFailed(draft.noted(FAILED).decode())


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
