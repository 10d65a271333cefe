"""Saving in the background: the run waits only while its state is copied, and another process writes the copy.

The copy lies in memory that both processes see. Each rank has a writer of its own. Writers find each other through the
draft that they write into, so that a save ends without the run's help, and die with the process they belong to.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import subprocess
import sys
import threading
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.exchange import together
from terrazzo.checkpoint.job import Job
from terrazzo.checkpoint.manifest import dtype_of
from terrazzo.checkpoint.snapshot import Snapshot, take
from terrazzo.checkpoint.store import Draft
from terrazzo.errors import BadInput, Misuse, SaveFailed

__all__ = ["Saver"]


_GRACE_S = 10.0  # for a save under way when the run ends with an error: the other ranks may be gone


class Saver:
    """Saves a sharded model and its optimizer while training goes on.

        with tz.checkpoint.Saver(model, optimizer) as saver:
            ...
            saver.save("runs/a/step-00000100", {"step": 100})

    One save is under way at a time: another waits for it. A failure is raised by the next `save`, `wait` or `close`,
    and a program that ends waits for what is under way. Make it in the main thread: its writer ends with the thread.

    Args:
        run: what tells this run from others that save in the same place.
        staging_limit_bytes: largest size of the copy of this rank's state; a larger one is refused with `BadInput`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        run: str = "",
        staging_limit_bytes: int | None = None,
    ) -> None:
        self._model, self._optimizer, self._run, self._limit = model, optimizer, run, staging_limit_bytes
        self._staging = _Staging()
        self._writer = _Writer(self._staging.descriptor)
        self._under_way: tuple[Job, Draft] | None = None
        self._ended = False
        atexit.register(self._at_exit)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.leave()  # the error that is on its way says more than a save that it may have broken

    def save(self, path: str | os.PathLike[str], extra: dict[str, Any]) -> None:
        """Copy the state of now and have it written to `path`; see `tz.checkpoint.save`. Collective.

        Raises:
            SaveFailed: the save before this one failed.
            BadInput: `path` exists, `extra` holds what JSON cannot, or the copy would exceed the limit.
        """
        if self._ended:
            raise Misuse("This Saver has been closed: make another one.")
        self.wait()
        snapshot = take(path, self._model, self._optimizer, extra, self._run)
        together(lambda: self._prepare(snapshot), SaveFailed)
        draft = snapshot.job.draft()
        try:
            together(draft.begin if snapshot.job.rank == 0 else lambda: None, SaveFailed)
            together(lambda: self._staging.copy(snapshot), SaveFailed)
        except BaseException:
            if snapshot.job.rank == 0:
                draft.abandon()
            raise
        self._under_way = snapshot.job, draft
        self._writer.start(snapshot.job)

    def failed(self) -> bool:
        """Whether it is known that the save under way has failed on this rank; never waits."""
        return self._under_way is not None and self._writer.done() and self._writer.result() is not None

    def wait(self) -> None:
        """Until no save is under way. Collective; raises `SaveFailed` on all ranks when it failed on one."""
        together(self._finish, SaveFailed)

    def close(self) -> None:
        """Wait, and end the writer. Collective."""
        try:
            self.wait()
        finally:
            self._end()

    def leave(self) -> None:
        """For a run that ends with an error: give the save under way ten seconds, since other ranks may be gone."""
        self._end(_GRACE_S)

    def _prepare(self, snapshot: Snapshot) -> None:
        if not self._writer.alive():
            self._writer.end()
            self._writer = _Writer(self._staging.descriptor)
        parts = snapshot.job.parts
        size_bytes = parts[-1].offset + parts[-1].count_bytes if parts else 0
        if self._limit is not None and size_bytes > self._limit:
            raise BadInput(
                f"A save in the background copies {size_bytes:,} bytes of this rank's state, and the limit is"
                f" {self._limit:,}: raise the limit, or use tz.checkpoint.save, which copies nothing."
            )
        self._staging.grow(size_bytes)

    def _finish(self) -> None:
        if self._under_way is None:
            return
        problem = self._writer.result()
        (job, draft), self._under_way = self._under_way, None
        if problem is not None and not draft.committed():  # it may have been lost just after the commit
            job.fail(draft, problem)
            if job.rank == 0:
                draft.abandon()
            raise SaveFailed(f"The checkpoint '{job.where}' was not saved: {problem} Earlier ones are as they were.")
        draft.close()

    def _at_exit(self) -> None:
        """Wait for the save under way and say how it ended; not for long after an error: other ranks may be gone."""
        if getattr(sys, "last_value", None) is not None:
            self.leave()
            return
        try:
            self._finish()
        finally:
            self._end()

    def _end(self, patience_s: float | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        atexit.unregister(self._at_exit)
        self._writer.end(patience_s)
        self._staging.close()
        if self._under_way is not None:
            (_, draft), self._under_way = self._under_way, None
            draft.close()


class _Staging:
    """Memory without a name that the writer sees too, as large as the largest save so far."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("terrazzo-checkpoint", os.MFD_CLOEXEC)
        self._memory: mmap.mmap | None = None

    def grow(self, size_bytes: int) -> None:
        """Make room. Raises `OSError` where there is none."""
        if size_bytes > (len(self._memory) if self._memory is not None else 0):
            os.posix_fallocate(self.descriptor, 0, size_bytes)  # now, and not as a fault in the middle of a copy
            self._memory = mmap.mmap(self.descriptor, size_bytes)

    def copy(self, snapshot: Snapshot) -> None:
        """The bytes of all parts, at their offsets."""
        for part in snapshot.job.parts:
            if part.count_bytes:
                self._view(part.offset, part.count_bytes, dtype_of(part.dtype)).copy_(snapshot.tensors[part.key]())

    def close(self) -> None:
        self._memory = None
        os.close(self.descriptor)

    def _view(self, offset: int, count_bytes: int, dtype: torch.dtype) -> Tensor:
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=count_bytes, offset=offset).view(dtype)


class _Writer:
    """The process that writes, and the thread that hears from it."""

    def __init__(self, staging: int) -> None:
        command = [sys.executable, "-m", "terrazzo.checkpoint.writer", str(staging), str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[staging],
            text=True,
            start_new_session=True,
        )
        self._answered = threading.Event()
        self._answered.set()
        self._problem: str | None = None

    def start(self, job: Job) -> None:
        """Hand over a job."""
        self._answered.clear()
        threading.Thread(target=self._listen, args=(job,), daemon=True, name="terrazzo-saver").start()

    def alive(self) -> bool:
        return self._process.poll() is None

    def done(self) -> bool:
        return self._answered.is_set()

    def result(self) -> str | None:
        """What went wrong with the newest job; waits for its end."""
        self._answered.wait()
        return self._problem

    def end(self, patience_s: float | None = None) -> None:
        """Let it finish what it is at, for so long at most, and end it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._answered.wait(patience_s):
            self._process.kill()
            self._answered.wait()
        self._process.kill()  # it is idle; a process forked from this one would keep its input open
        with contextlib.suppress(OSError):  # a job that it did not take is still in the pipe's buffer
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _listen(self, job: Job) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(job.to_json() + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            self._problem = json.loads(answer)["problem"] if answer else self._died()
        except (OSError, ValueError, KeyError):
            self._problem = self._died()
        finally:
            self._answered.set()

    def _died(self) -> str:
        self._process.kill()
        code = self._process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the process that writes it was {how}."
