"""Saving in the background: the run waits only while its state is copied, and another process writes the copy.

The copy lies in memory that both processes see. Each rank has a writer of its own. Writers find each other through the
draft that they write into, so that a save ends without the run's help, and die with the process they belong to.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import platform
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from terrazzo.checkpoint.optimizers import Optimizers
from terrazzo.checkpoint.saving.job import SaveJob
from terrazzo.checkpoint.saving.snapshot import Snapshot, take
from terrazzo.checkpoint.saving.staging import Staging
from terrazzo.checkpoint.saving.writer_process import BRIEF_S, StandStill, WriterProcess
from terrazzo.checkpoint.storage.store import CheckpointDraft, not_saved
from terrazzo.engine import engine_of
from terrazzo.errors import BadInput, Misuse, SaveFailed
from terrazzo.exchange import broadcast_json, gather_json, on_first, require_alike, timeout_s, together
from terrazzo.given_numbers import is_count, is_number
from terrazzo.processes.ending import leaves_to_parent, require_own

__all__ = ["Saver"]


_GRACE_S = 10.0  # for a save under way that nobody waits for any more: the other ranks may be gone
_BUSY, _DONE, _FAILED, _LATE = "busy", "done", "failed", "late"  # what a rank knows of the save under way


class Saver:
    """Saves a sharded model and its optimizer while training goes on.

        with tz.checkpoint.Saver(model, optimizer) as saver:
            ...
            saver.save("runs/a/step-00000100", {"step": 100})

    One save is under way at a time: another waits for it. A failure is raised by the next `save`, `wait` or `close`,
    and a program that ends waits for what is under way. Make it in the main thread: its writer ends with the thread.

    A writer may take its time, but not stand still: one that shows no progress for `patience_s` while ranks wait for
    it is ended, and the save has failed. So has one in which a rank's part comes that much later than another's.

    Args:
        run: what tells this run from others that save in the same place.
        staging_limit_bytes: largest size of the copy of this rank's state; a larger one is refused with `BadInput`.
        patience_s: the same on all ranks; default: the timeout of the default process group.

    Raises:
        BadInput: a number that is none, or too small.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizers,
        *,
        run: str = "",
        staging_limit_bytes: int | None = None,
        patience_s: float | None = None,
    ) -> None:
        self._model, self._optimizer, self._run, self._limit = model, optimizer, run, staging_limit_bytes
        _check_numbers(staging_limit_bytes, patience_s)
        self._patience_s = timeout_s() if patience_s is None else float(patience_s)
        self._staging = Staging(engine_of(model).axes.device)
        self._writer = WriterProcess(self._staging.descriptor, self._patience_s)
        self._stuck: list[WriterProcess | threading.Thread] = []
        self._under_way: tuple[SaveJob, CheckpointDraft] | None = None
        self._ended, self._process = False, os.getpid()
        atexit.register(self._at_exit)
        leaves_to_parent(self)

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
            SaveFailed: the save before this one failed, or a writer of one that failed is still held by the system.
            BadInput, RanksApart: as from `tz.checkpoint.save`, or the copy would exceed the limit.
        """
        require_own(self._process, "Saver")
        if self._ended:
            raise Misuse("This Saver has been closed: make another one.")
        self.wait()
        require_alike({"patience_s": f"{self._patience_s:g}"})
        together(self._check_answers, SaveFailed)
        snapshot = take(path, self._model, self._optimizer, extra, self._run)
        together(lambda: self._prepare(snapshot), SaveFailed)
        draft = snapshot.job.draft()
        try:
            on_first(draft.begin)
            together(lambda: self._staging.copy(snapshot), SaveFailed)
        except BaseException:
            if snapshot.job.rank == 0:
                draft.abandon()
            raise
        self._under_way = snapshot.job, draft
        self._writer.start(snapshot.job)

    def failed(self) -> bool:
        """Whether it is known that the save under way has failed on this rank; never waits."""
        return self._under_way is not None and self._writer.done() and self._writer.problem() is not None

    def wait(self) -> None:
        """Until no save is under way. Collective; raises `SaveFailed` on all ranks when it failed on one."""
        require_own(self._process, "Saver")
        watch = StandStill(self._writer, self._patience_s)
        while True:  # in rounds: ranks learn of each other's trouble without a file system that may be the trouble
            known = gather_json(None if self._under_way is None else self._look(watch, *self._under_way))
            states = [state for state, _ in filter(None, known)]
            if _LATE in states or _BUSY not in states:
                break
        if self._under_way is not None:
            self._conclude(_DONE in states, next((text for _, text in known if text), ""))

    def close(self) -> None:
        """Wait, and end the writer. Collective. An error that breaks the waiting off leaves as `leave` does."""
        try:
            self.wait()
        finally:
            self._end()

    def leave(self) -> None:
        """For a run that ends with an error: give the save under way ten seconds, since other ranks may be gone."""
        self._end()

    def leave_to_parent(self) -> None:
        """In a forked child: the writer and the save under way are the parent's."""
        if not self._ended:
            self._ended, self._under_way = True, None
            atexit.unregister(self._at_exit)
            self._writer.hang_up()
            self._staging.leave_to_parent()

    def _prepare(self, snapshot: Snapshot) -> None:
        if not self._writer.is_alive():
            self._writer.end(BRIEF_S)
            self._writer = WriterProcess(self._staging.descriptor, self._patience_s)
        entries = snapshot.job.entries
        size_bytes = entries[-1].offset + entries[-1].count_bytes if entries else 0
        if self._limit is not None and size_bytes > self._limit:
            raise BadInput(
                f"A save in the background copies {size_bytes:,} bytes of this rank's state, and the limit is"
                f" {self._limit:,}: raise the limit, or use tz.checkpoint.save, which copies nothing."
            )
        self._staging.grow(size_bytes)

    def _check_answers(self) -> None:
        """Raises `SaveFailed` while what a failed save has left is still waiting for a file system."""
        self._stuck = [one for one in self._stuck if one.is_alive()]
        if self._stuck:
            raise SaveFailed(
                f"The checkpoint was not saved: on {platform.node()}, what writes for rank {dist.get_rank()} is still"
                " waiting for the file system of a save that has failed. Have that answer again, or start the run anew"
                " with another checkpoint folder."
            )

    def _look(self, watch: StandStill, job: SaveJob, draft: CheckpointDraft) -> tuple[str, str]:
        """What is known of the save under way, and what is wrong with it; waits a moment for more."""
        if watch.late():
            return _LATE, (
                f"process {self._writer.pid} on {platform.node()}, which writes the part of rank {job.rank}, made no"
                f" progress for {self._patience_s:.0f} s and was ended. It had been stopped, or the file system does"
                " not answer: see to that and start again. If it is that slow, raise launch.timeout_s (patience_s of"
                " a Saver)."
            )
        if not self._writer.done():
            return _BUSY, ""
        if (problem := self._writer.problem()) is None:
            return _DONE, ""
        with contextlib.suppress(Exception):  # of whatever kind a store has: other ranks wait to hear of this one
            if draft.committed():  # it may have died just after the commit
                return _DONE, ""
        job.fail(draft, problem)
        return _FAILED, problem

    def _conclude(self, committed: bool, problem: str) -> None:
        """The save is over, on every rank alike. Collective when it has failed."""
        assert self._under_way is not None
        (job, draft), self._under_way = self._under_way, None
        if not self._writer.stop():
            self._stuck.append(self._writer)
        if not committed:  # the first rank's writer may have done it before it was stopped
            seen: list[bool] = []
            if job.rank == 0:
                self._briefly(lambda: seen.append(draft.committed()))
            committed = broadcast_json(seen) == [True]
        if committed:
            self._briefly(draft.close)
            return
        if job.rank == 0:
            self._briefly(draft.abandon)
        raise not_saved(job.where, problem)

    def _briefly(self, work: Callable[[], object]) -> None:
        """Do it, but leave it behind when the file system does not answer."""
        thread = threading.Thread(target=work, daemon=True, name="terrazzo-saver")
        thread.start()
        thread.join(BRIEF_S)
        if thread.is_alive():
            self._stuck.append(thread)

    def _at_exit(self) -> None:
        """Wait for the save under way and say how it ended; not for long after an error: other ranks may be gone."""
        if getattr(sys, "last_value", None) is not None:
            self.leave()
            return
        try:
            if self._under_way is not None:
                self._finish_alone(*self._under_way)
        finally:
            self._end()

    def _finish_alone(self, job: SaveJob, draft: CheckpointDraft) -> None:
        """Until this rank's writer has ended its part, or stands still. Other ranks may be at something else."""
        watch, state, problem = StandStill(self._writer, self._patience_s), _BUSY, ""
        while state == _BUSY:
            state, problem = self._look(watch, job, draft)
        self._under_way = None
        self._writer.stop()
        self._briefly(draft.close if state == _DONE or job.rank else draft.abandon)
        if state != _DONE:
            raise not_saved(job.where, problem)

    def _end(self) -> None:
        """With a save under way, an error came before its end was known; else a writer still busy cannot be killed."""
        if self._ended:
            return
        self._ended = True
        atexit.unregister(self._at_exit)
        self._writer.end(_GRACE_S if self._under_way is not None else 0.0)
        self._staging.close()
        if self._under_way is not None:
            (_, draft), self._under_way = self._under_way, None
            self._briefly(draft.close)


def _check_numbers(staging_limit_bytes: object, patience_s: object) -> None:
    if not (staging_limit_bytes is None or is_count(staging_limit_bytes, least=0)):
        raise BadInput(f"staging_limit_bytes is {staging_limit_bytes!r}: give a number of bytes, or None for no limit.")
    if not (patience_s is None or (is_number(patience_s) and 0 < patience_s < math.inf)):
        raise BadInput(
            f"patience_s is {patience_s!r}: give a number of seconds above 0, or None for the timeout of the process"
            " group."
        )
