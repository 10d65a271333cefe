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

_threads: weakref.WeakSet[_Thread] = weakref.WeakSet()


class _Thread(threading.Thread):
    def __init__(self, name: str, work: Callable[[], None], ask: Callable[[], object], patience_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self._work: Callable[[], None] | None = work
        self._ask: Callable[[], object] | None = ask
        self.patience_s = patience_s

    def run(self) -> None:
        assert self._work is not None
        try:
            self._work()
        finally:
            self._work = self._ask = None  # what they hold may be the last of a model: free it while exit waits for us

    def ask(self) -> None:
        if (ask := self._ask) is not None:
            ask()


def start_thread(name: str, work: Callable[[], None], ask: Callable[[], object], patience_s: float = 10.0) -> None:
    """A daemon thread that does `work`.

    An interpreter that exits cuts daemons off wherever they next need its lock, and aborts if that is within torch:
    they are asked to end, and given time to come out of there.

    Args:
        ask: has it end soon.
        patience_s: how long the exit of the process waits for it to end.
    """
    thread = _Thread(name, work, ask, patience_s)
    _threads.add(thread)
    thread.start()


@atexit.register
def _end_all() -> None:
    running = [thread for thread in list(_threads) if thread.is_alive()]
    for thread in running:
        thread.ask()
    asked = time.monotonic()
    for thread in running:
        thread.join(max(0.0, asked + thread.patience_s - time.monotonic()))


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
        meets_ranks: whether jobs wait for other ranks, which may be gone.
    """

    def __init__(self, name: str, meets_ranks: bool = False) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Callable[[], None]] | None] = queue.SimpleQueue()
        jobs = self._jobs  # the thread must not hold the object whose end it waits for
        start_thread(name, lambda: _work(jobs), lambda: jobs.put(None), patience_s=3.0 if meets_ranks else 10.0)

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
