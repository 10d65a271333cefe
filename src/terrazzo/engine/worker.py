"""Threads that do a rank's errands: exchanges with its neighbours, updates of offloaded states, reads from drives."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch

__all__ = ["Job", "Worker", "start_thread"]

_PATIENCE_S = 10.0
_running: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def start_thread(name: str, work: Callable[[], None], stop: Callable[[], object]) -> threading.Thread:
    """A thread that does `work`, and is asked to stop when the process exits.

    It is a daemon: a rank that has lost a peer must be able to exit while the thread waits for it. But an interpreter
    that cuts a daemon off within one of torch's kernels aborts, so it is given time to come out of there.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    _running[thread] = stop
    thread.start()
    return thread


@atexit.register
def _stop_all() -> None:
    until = time.monotonic() + _PATIENCE_S
    running = [(thread, stop) for thread, stop in _running.items() if thread.is_alive()]
    for _, stop in running:
        stop()
    for thread, _ in running:
        thread.join(max(0.0, until - time.monotonic()))


class Job(Future[None]):
    """Something that a `Worker` will have done."""

    def wait(self) -> None:
        """Return once it is done. Errors: what it raised."""
        self.result()


class Worker:
    """A thread that does jobs one after the other, in the order they came; it ends with the object.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Callable[[], None]] | None] = queue.SimpleQueue()
        jobs = self._jobs  # the thread must not hold the object whose end it waits for
        self.thread = start_thread(name, lambda: _work(jobs), lambda: jobs.put(None))

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
