"""N ranks as N threads of this process: real collectives on real tensors in milliseconds.

The only file that touches torch's private threaded process group. What threads cannot show (true concurrency
of collectives, crashes, separate memory) belongs to `processes.py`.

The ranks share one interpreter, and so torch's default random generator: build and seed a model inside
`with exclusive(): ...`, or build it once outside and deepcopy it on each rank.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import (
    Collective,
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
    ret_work,
)
from torch.utils._python_dispatch import _disable_current_modes, _len_torch_dispatch_stack

from terrazzo.engine.comm import control_exchanges
from terrazzo.engine.comm.backends import BY_BACKEND
from tests.helpers import meetings, turns
from tests.helpers.threaded import ThreadedCollectives

BY_BACKEND["threaded"] = ThreadedCollectives

T = TypeVar("T")
_exclusive = threading.Lock()
_store_based_barrier = distributed_c10d._store_based_barrier
_ended = ret_work(None)
"""What every collective returns: it has ended, and nobody asks for its result."""


class RanksStuck(RuntimeError):
    """Some ranks waited for the others until the time was up."""


@contextmanager
def exclusive() -> Iterator[None]:
    """One rank at a time; for code that uses process-wide state such as the default random generator."""
    with turns.waiting():
        _exclusive.acquire()
    try:
        yield
    finally:
        _exclusive.release()


def run_in_threads(world_size: int, function: Callable[[int], T], timeout_s: float = 150.0) -> list[T]:
    """`function(rank)` on every rank of a fresh default group; the results in rank order.

    The first exception of any rank is raised again here, as itself, with its own traceback; the other ranks
    are woken from their collectives and end. Raises `RanksStuck` when ranks still wait after `timeout_s`.
    """
    ranks = _Ranks(world_size, function)
    with _threaded_backend(), _collected_here():
        threads = [threading.Thread(target=ranks.body, args=(r,), daemon=True) for r in range(world_size)]
        for thread in threads:
            thread.start()
        stuck = _join(threads, timeout_s)
        ranks.are_over = True
    if ranks.failures:
        rank, error = ranks.failures[0]
        error.add_note(f"raised on rank {rank} of {world_size}")
        raise error
    if stuck:
        raise RanksStuck(f"ranks {stuck} of {world_size} were still waiting after {timeout_s:.0f} s")
    return [ranks.results[rank] for rank in range(world_size)]


class _Ranks(Generic[T]):
    """What the threads share: the function, the store they meet at, results and failures."""

    def __init__(self, world_size: int, function: Callable[[int], T]) -> None:
        self.world_size, self.function = world_size, function
        self.store = dist.HashStore()
        self.results: dict[int, T] = {}
        self.failures: list[tuple[int, BaseException]] = []
        self.turn = threading.Lock()
        self.are_over = False  # what a rank that was stuck comes to later is nothing to those of another test

    def body(self, rank: int) -> None:
        try:
            dist.init_process_group("threaded", store=self.store, rank=rank, world_size=self.world_size)
            with torch.autograd.set_multithreading_enabled(False), turns.taken(self.turn):
                self.results[rank] = self.function(rank)
        except SystemExit:
            pass  # how the threaded group ends a rank whose peers have failed
        except BaseException as error:
            self.failures.append((rank, error))
            if not self.are_over:
                _wake_others(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def _threaded_backend() -> Iterator[None]:
    _set_thread_isolation_mode(True)  # before the install: groups registered earlier would be shared
    _install_threaded_pg()
    try:
        with (
            mock.patch.multiple(ProcessLocalGroup, **meetings.OF_GROUPS),
            mock.patch.object(dist, "all_reduce", meetings.all_reduce),
            mock.patch.object(control_exchanges, "all_gather_single", meetings.all_gather),
            mock.patch.object(Collective, "join", _join_collective),
            mock.patch.object(ProcessLocalGroup, "_start_coll", meetings.start),
            mock.patch.object(distributed_c10d, "_store_based_barrier", _meet_in_store),
            mock.patch.object(sys, "excepthook", sys.excepthook),  # which every rank wraps once more
        ):
            yield
    finally:
        _uninstall_threaded_pg()
        ProcessLocalGroup.reset()
        meetings.broken.clear()
        _set_thread_isolation_mode(False)


@contextmanager
def _collected_here() -> Iterator[None]:
    """No rank collects garbage: `_join` does.

    Torch makes the tensor that `get_rng_state` returns with its generator locked and Python's lock held. A collection
    that begins there may run Python code, so that another rank is let in, which waits for the generator for ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# -- torch's collectives with one wake-up rather than two; what each does is in `meetings`


def _join_collective(self: Any, rank: int, data: Any) -> dist.Work:
    """In place of `Collective.join`: whoever comes last does the work, which no dispatch mode of that rank's sees."""
    with self._done_cond:
        self._data[rank] = data
        self._count += 1
        if self._count == self._world_size and not self._pg._terminate.is_set():
            with _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext():
                self._collective.work(self._data)
            self._done = True
            self._done_cond.notify_all()
        if not self._done:
            turns.give()
        self._done_cond.wait_for(lambda: self._done or self in meetings.broken or self._pg._terminate.is_set())
    turns.take()
    if self._pg._terminate.is_set():
        sys.exit("another rank has failed")
    if not self._done:
        raise meetings.closed()
    return _ended


def _meet_in_store(*arguments: Any, **options: Any) -> None:
    with turns.waiting():
        _store_based_barrier(*arguments, **options)


def _wake_others(error: BaseException) -> None:
    """Of several ranks that fail at once, one may find the list of collectives changing under it."""
    while True:
        try:
            return ProcessLocalGroup.exception_handle(error)
        except RuntimeError:
            time.sleep(0.001)


_COLLECT_S = 1.0
"""Between two collections of garbage while ranks run."""


def _join(threads: list[threading.Thread], timeout_s: float) -> list[int]:
    """Wait for every thread; wake those still waiting at the end, and say which they were."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(left, _COLLECT_S))
            gc.collect(1)
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck:
        _wake_others(RanksStuck())
        for rank in stuck:
            threads[rank].join(5.0)
    return stuck


def in_threads(barrier: threading.Barrier, body: Callable[[int], T]) -> list[T]:
    """`body(rank)` in as many threads as meet at `barrier`, without any process group; the results in rank order.

    An error breaks the barrier, and is raised again.
    """
    found: list[T | BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = body(rank)
        except BaseException as error:
            found[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(barrier.parties)]
    found += [RanksStuck(f"rank {rank} has not ended") for rank in range(barrier.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = []
    for each in found:
        if isinstance(each, BaseException):
            raise each
        results.append(each)
    return results
