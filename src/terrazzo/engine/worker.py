"""Threads that do a rank's errands: exchanges with its neighbours, updates of offloaded states, reads from drives."""

from __future__ import annotations

import atexit
import copy
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch

__all__ = ["Job", "Worker", "again", "start_thread"]

_PATIENCE_S = 10.0
_running: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def start_thread(name: str, work: Callable[[], None], stop: Callable[[], object] | None = None) -> threading.Thread:
    """A daemon thread that does `work`.

    Args:
        stop: asks it to end. An interpreter that exits cuts daemons off, and aborts if that is within one of torch's
            kernels: a thread that can be asked is given time to come out of there. None for one that waits for other
            ranks, which may be gone.
    """

    def run() -> None:
        try:
            work()
        finally:
            _running.pop(threading.current_thread(), None)  # what `stop` holds is let go of here

    thread = threading.Thread(target=run, name=name, daemon=True)
    if stop is not None:
        _running[thread] = stop
    thread.start()
    return thread


@atexit.register
def _stop_all() -> None:
    until = time.monotonic() + _PATIENCE_S
    running = [(thread, stop) for thread, stop in list(_running.items()) if thread.is_alive()]
    for _, stop in running:
        stop()
    for thread, _ in running:
        thread.join(max(0.0, until - time.monotonic()))


def again(error: BaseException) -> BaseException:
    """The same error as an object of its own.

    Whoever raises an error adds frames to it, and with them all that is alive there: who keeps one to raise it once
    more keeps a copy, or the model that has failed could never be freed.
    """
    try:
        return copy.copy(error)
    except Exception:  # not every class can be copied
        return RuntimeError(str(error))


class Job(Future[None]):
    """Something that a `Worker` will have done."""

    def wait(self) -> None:
        """Return once it is done. Errors: what it raised."""
        self.result()


class Worker:
    """A thread that does jobs one after the other, in the order they came; it ends with the object.

    Args:
        name: of the thread.
        meets_ranks: whether jobs wait for other ranks.
    """

    def __init__(self, name: str, meets_ranks: bool = False) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Callable[[], None]] | None] = queue.SimpleQueue()
        jobs = self._jobs  # the thread must not hold the object whose end it waits for
        self.thread = start_thread(name, lambda: _work(jobs), None if meets_ranks else lambda: jobs.put(None))

    def __del__(self) -> None:
        self._jobs.put(None)

    def submit(self, job: Callable[[], None]) -> Job:
        done = Job()
        self._jobs.put((done, job))
        return done


def _work(jobs: queue.SimpleQueue[tuple[Job, Callable[[], None]] | None]) -> None:
    with torch.no_grad():
        while _do_next(jobs):
            pass


def _do_next(jobs: queue.SimpleQueue[tuple[Job, Callable[[], None]] | None]) -> bool:
    """False at the end. What a job holds is gone when it counts as done, and when the next one is awaited."""
    item = jobs.get()
    if item is None:
        return False
    done, job = item
    del item
    failure: BaseException | None = None
    try:
        job()
    except BaseException as error:
        failure = error
    del job
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)
    return True
