"""Threads that work for a rank in the background: exchanges with its neighbours, copies, swap files."""

from __future__ import annotations

import copy
import os
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future

import torch

from terrazzo.errors import Misuse, TerrazzoError
from terrazzo.processes.ending import Thread, require_own, start_thread

__all__ = ["Job", "Worker", "again", "without_frames"]

_Jobs = queue.SimpleQueue["tuple[Job, Callable[[], None]] | None"]


def again(error: BaseException) -> BaseException:
    """A copy of an error, to be raised once more.

    Whoever raises an error adds frames to it, and with them all that is alive there: who keeps one to raise it once
    more keeps a copy, or the model that has failed could never be freed.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # not every class can be copied
        copied = RuntimeError(str(error))
    if notes := getattr(error, "__notes__", None):
        copied.__notes__ = list(notes)
    return copied


def without_frames(error: BaseException) -> BaseException:
    """A copy of an error for another thread, with its traceback as text: frames would keep what they hold alive.

    One of Terrazzo's has none: its message is enough, and where it was asked for is in the traceback of whoever waits.
    """
    copied = again(error)
    if isinstance(error, TerrazzoError):
        return copied
    copied.add_note("".join(["In a background thread:\n", *traceback.format_exception(error)]).rstrip())
    return copied


class Job(Future[None]):
    """Something that a thread will have done. A forked child cannot ask for it: the thread is not there."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def wait(self) -> None:
        """Return once it is done.

        Raises:
            Exception: what it raised.
        """
        error = self.failure()
        if error is not None:
            raise again(error)  # a copy: with frames of whoever waits, the job would hold on to who holds it

    def failure(self) -> BaseException | None:
        """What it raised, or None, once it is done."""
        require_own(self._process)
        return self.exception()


class Worker:
    """Threads that do jobs in the order they came; they end with the object.

    Args:
        name: of the threads.
        threads: how many; with one, jobs are done one after the other.
        break_off: for jobs that wait for other ranks, which may be gone: ends such a wait where the process exits.
    """

    def __init__(self, name: str, threads: int = 1, break_off: Callable[[], object] | None = None) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._closing, self._closed = threading.Lock(), False
        self._process = os.getpid()
        self._threads: list[Thread] = []
        jobs = self._jobs  # the threads must not hold the object whose end they wait for
        for _ in range(threads):
            thread = start_thread(name, lambda: _work(jobs), lambda: _end(jobs, threads))
            if break_off is not None:
                thread.can_be_broken_off(break_off, patience_s=3.0)
            self._threads.append(thread)

    def __del__(self) -> None:
        _end(self._jobs, len(self._threads))

    def submit(self, work: Callable[[], None]) -> Job:
        """Have a thread do `work`, after what came before.

        Raises:
            Misuse: in a forked child, and once it is closed.
        """
        require_own(self._process)
        job = Job()
        with self._closing:  # what comes after the end would never be done
            if self._closed:
                raise Misuse("A job was given to threads that have been closed: give it before close().")
            self._jobs.put((job, work))
        return job

    def close(self) -> None:
        """Return once all jobs are done and the threads have ended."""
        require_own(self._process)
        with self._closing:
            self._closed = True
            threads, self._threads = self._threads, []
            _end(self._jobs, len(threads))
        for thread in threads:
            thread.join()


def _end(jobs: _Jobs, threads: int) -> None:
    """Whichever of the threads takes it, there is one for each."""
    for _ in range(threads):
        jobs.put(None)


def _work(jobs: _Jobs) -> None:
    with torch.no_grad():
        while _do_next(jobs):
            pass


def _do_next(jobs: _Jobs) -> bool:
    """False at the end. What the work holds is gone when its job counts as done, and when the next one is awaited."""
    item = jobs.get()
    if item is None:
        return False
    job, work = item
    del item
    failure: BaseException | None = None
    try:
        work()
    except BaseException as error:
        failure = without_frames(error)
    del work
    if failure is None:
        job.set_result(None)
    else:
        job.set_exception(failure)
    return True
