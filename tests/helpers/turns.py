"""Ranks that are threads take turns: one runs, until it waits for the others.

An operation of torch gives Python's lock away for its time, however short. Were all ranks to run at once, another one
would take it each time, and two switches of threads cost more than the operation.

It is no promise. Others run beside a rank that keeps its turn for longer than `PATIENCE_S`: it computes, or waits for
another in a way that this does not know of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["give", "take", "taken", "waiting"]

PATIENCE_S = 0.02


class _Own(threading.local):
    """This thread's: the lock that the ranks of its run share, or None where it is no rank; whether it has it."""

    turn: threading.Lock | None = None
    has: bool = False


_own = _Own()


def take() -> None:
    """Wait for the turn, but not for ever."""
    if _own.turn is not None and not _own.has:
        _own.has = _own.turn.acquire(timeout=PATIENCE_S)


def give() -> None:
    """Another rank may run."""
    if _own.turn is not None and _own.has:
        _own.has = False
        _own.turn.release()


@contextmanager
def waiting() -> Iterator[None]:
    """Around what waits for another rank."""
    give()
    try:
        yield
    finally:
        take()


@contextmanager
def taken(turn: threading.Lock) -> Iterator[None]:
    """This thread is one of the ranks that share `turn`."""
    _own.turn = turn
    take()
    try:
        yield
    finally:
        give()
        _own.turn = None
