"""How things end: finalizers of garbage, the exit of the process, and what a forked child must leave alone.

The garbage collector runs at any allocation, in any thread, even in one that is inside `threading` and holds a lock
there. A finalizer that takes a lock, joins, waits or does I/O may then wait for itself, and every later start of a
thread too. So finalizers here only leave a note, and a thread acts on it; tools/lint/finalizers.py checks that there
are no others.

Notes are left by `SimpleQueue.put`. The library reference says of it: "This method has a C implementation which is
reentrant. That is, a put() or get() call can be interrupted by another put() call in the same thread without
deadlocking or corrupting internal state inside the queue. This makes it appropriate for use in destructors such as
__del__ methods or weakref callbacks."

An exiting interpreter stops daemon threads where they next need the GIL. If that is within C++, such as torch's, the
process aborts: "terminate called without an active exception". So all threads are ended before.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from terrazzo.errors import Misuse

__all__ = ["Ending", "Thread", "leaves_to_parent", "require_own", "start_thread"]

_TASKS = Path("/proc/self/task")
_GLOO = "pt_gloo_runloop"
_IDLE_S, _PATIENCE_S, _LAST_PATIENCE_S = 0.01, 5.0, 3.0


# -- threads -----------------------------------------------------------------------------------------------------------


class Thread(threading.Thread):
    """See `start_thread`."""

    def __init__(self, name: str, work: Callable[[], None], ask: Callable[[], object], patience_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self._work: Callable[[], None] | None = work
        self._ask: Callable[[], object] | None = ask
        self._break_off: Callable[[], object] | None = None
        self.patience_s, self.number = patience_s, next(_numbers)

    def run(self) -> None:
        assert self._work is not None
        try:
            self._work()
        finally:  # what they hold may be the last of a model: free it while exit waits for us
            self._work = self._ask = self._break_off = None

    def can_be_broken_off(self, break_off: Callable[[], object], patience_s: float) -> None:
        """For a thread that may wait for others too long: `break_off` ends its wait, `patience_s` seconds into exit."""
        self._break_off, self.patience_s = break_off, patience_s

    def ask(self) -> None:
        """Ask the thread to end soon."""
        if (ask := self._ask) is not None:
            ask()

    def break_off(self) -> None:
        """End the wait of the thread."""
        if (break_off := self._break_off) is not None:
            break_off()


def start_thread(name: str, work: Callable[[], None], ask: Callable[[], object], *, patience_s: float = 60.0) -> Thread:
    """Start a thread that does `work`. The exit of the process waits for it.

    Args:
        ask: is called at exit, and asks the thread to end soon.
        patience_s: for how long exit waits.
    """
    thread = Thread(name, work, ask, patience_s)
    thread.start()  # may raise: then there is none to wait for
    _threads.add(thread)
    return thread


_threads: weakref.WeakSet[Thread] = weakref.WeakSet()
_numbers = itertools.count()


# -- what nobody has any more ------------------------------------------------------------------------------------------


class Ending:
    """Work that is done once: when this object is called, soon after `owner` is garbage, or when the process exits.

    Args:
        owner: must not be reachable from `work`.
        work: raises nothing; may take locks, wait and do I/O.
    """

    def __init__(self, owner: object, work: Callable[[], object]) -> None:
        global _reaper
        if _reaper is None:  # here, as no thread can be started in a finalizer
            notes = _notes
            _reaper = start_thread("terrazzo-reaper", lambda: _reap(notes), lambda: notes.put(None))
        self._work = work
        self._finalizer = weakref.finalize(owner, _notes.put, self)
        self._finalizer.atexit = False
        _open.add(self)

    def __call__(self) -> None:
        if self.cancel():
            self._work()

    def cancel(self) -> bool:
        """Prevent the work; returns False if it has begun already."""
        try:
            _open.remove(self)
        except KeyError:
            return False
        self._finalizer.detach()
        return True


def _reap(notes: queue.SimpleQueue[Ending | None]) -> None:
    while (ending := notes.get()) is not None:
        _guarded(ending)
        del ending


def _guarded(work: Callable[[], object]) -> None:
    """Do `work`, and print what it raises: other work is still to be done."""
    try:
        work()
    except Exception:
        traceback.print_exc()


_notes: queue.SimpleQueue[Ending | None] = queue.SimpleQueue()
_reaper: Thread | None = None
_open: set[Ending] = set()


# -- the exit of the process -------------------------------------------------------------------------------------------


@atexit.register
def _end_all() -> None:
    began = time.monotonic()
    for thread in sorted(_threads, key=lambda thread: -thread.number):  # newer ones may wait for older ones
        _guarded(partial(_end, thread, began))
    _guarded(_await_gloo)
    for ending in list(_open):
        _guarded(ending)


def _end(thread: Thread, began: float) -> None:
    """Ask the thread to end, and wait for it as long as it may take since exit `began`."""
    _guarded(thread.ask)
    thread.join(max(0.0, began + thread.patience_s - time.monotonic()))
    if thread.is_alive():
        _guarded(thread.break_off)
        thread.join(_LAST_PATIENCE_S)


def _await_gloo() -> None:
    """Wait until gloo's own threads are idle.

    They release a collective's tensors a moment after the collective has returned, and need the GIL for that
    (docs/decisions.md). torch has no call that waits for it, but the kernel says whether threads sleep.
    """
    deadline = time.monotonic() + _PATIENCE_S
    before = _gloo_threads()
    while before and time.monotonic() < deadline:
        time.sleep(_IDLE_S)
        now = _gloo_threads()
        if now == before and all("State:\tS" in status for status in now.values()):
            return
        before = now


def _gloo_threads() -> dict[str, str]:
    """For each of gloo's threads its state and counts of context switches; empty if that is not known."""
    statuses = {}
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():  # it is Linux's
        with contextlib.suppress(OSError):  # the thread has ended
            if (task / "comm").read_text().strip() == _GLOO:
                lines = (task / "status").read_text().splitlines()
                statuses[task.name] = "\n".join(line for line in lines if line.startswith("State") or "ctxt" in line)
    return statuses


# -- forks -------------------------------------------------------------------------------------------------------------


class _Owner(Protocol):
    def leave_to_parent(self) -> None: ...


def leaves_to_parent(owner: _Owner) -> None:
    """Have a forked child call `owner.leave_to_parent()`, so that it holds nothing that is the parent's.

    The method may close descriptors, but take no locks: a thread that held one is not there to release it.
    """
    _owners.add(owner)


def require_own(process: int, what: str = "sharded model") -> None:
    """Raise `Misuse` if this is not `process` but a fork of it, without its threads and connections."""
    if process != os.getpid():
        raise Misuse(
            f"This {what} belongs to the process that this one was forked from (pid {process}), and cannot be used "
            "here. Use it there; a child that needs the weights loads a checkpoint, or is given a state_dict."
        )


def _forked() -> None:
    global _notes, _reaper
    _threads.clear()
    _notes, _reaper = queue.SimpleQueue(), None
    for ending in list(_open):
        ending.cancel()
    for owner in list(_owners):
        owner.leave_to_parent()


_owners: weakref.WeakSet[_Owner] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forked)
