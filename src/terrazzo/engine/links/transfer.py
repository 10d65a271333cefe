"""Collectives in flight, chains of them, and what is counted about them: bytes sent, time waited, memory held.

A move is written as a generator that yields `Handle`s: it starts a collective, yields it, and is resumed once the
collective has finished. A `Transfer` drives such a generator, so a chain of collectives stays asynchronous without
callbacks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from terrazzo.engine.links.label import Label, moving

__all__ = ["Handle", "Ledger", "Moves", "Traffic", "Transfer", "at_once"]


@dataclass
class Traffic:
    """What one rank sent, by kind of collective, and how long it waited. Counts and bytes are exact."""

    count: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    wait_s: float = 0.0

    def record(self, kind: str, sent_bytes: int, count: int = 1) -> None:
        self.count[kind] += count
        self.bytes[kind] += sent_bytes

    def reset(self) -> None:
        self.count.clear()
        self.bytes.clear()
        self.wait_s = 0.0

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


@dataclass
class Ledger:
    """Bytes of transient memory held now, and at most: gathered weights, unreduced gradients, receive buffers."""

    live_bytes: int = 0
    peak_bytes: int = 0

    def take(self, count_bytes: int) -> None:
        self.live_bytes += count_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def give(self, count_bytes: int) -> None:
        self.live_bytes -= count_bytes

    @contextmanager
    def holding(self, count_bytes: int) -> Iterator[None]:
        self.take(count_bytes)
        try:
            yield
        finally:
            self.give(count_bytes)


class Handle:
    """Collectives in flight, started together. Keeps their tensors alive until they have finished.

    Args:
        traffic: where the time that they are waited for is counted, if it is.
    """

    def __init__(self, works: Sequence[Any] = (), keep: Sequence[Tensor] = (), traffic: Traffic | None = None) -> None:
        self._works, self._keep, self._traffic = works, keep, traffic

    def wait(self) -> None:
        """Return once the results may be used: by the host for gloo, by the current stream for NCCL."""
        start = time.perf_counter()
        for work in self._works:
            if work is not None:
                work.wait()
        self._works, self._keep = (), ()
        if self._traffic is not None:
            self._traffic.wait_s += time.perf_counter() - start


Moves = Generator[Handle, None, Tensor]
"""A chain of collectives: yields each while it is in flight, returns the moved tensor."""


class Transfer:
    """A chain of collectives under way; at most one of its collectives is in flight at any time.

    Args:
        label: what is moved; that of the chain which starts this one, if not given.
    """

    def __init__(self, moves: Moves, label: Label | None = None) -> None:
        self._moves, self._label = moves, label or moving.get()
        self._in_flight: Handle | None = None
        self._result: Tensor | None = None
        self._start_next()

    @property
    def done(self) -> bool:
        return self._in_flight is None

    @property
    def in_flight(self) -> Handle | None:
        return self._in_flight

    def advance(self) -> None:
        """Wait for the collective in flight, if any, and start the next one."""
        if self._in_flight is not None:
            self._in_flight.wait()
            self._start_next()

    def finish(self) -> Tensor:
        """Run the chain to its end and return what it moved."""
        while self._in_flight is not None:
            self.advance()
        if self._result is None:
            raise RuntimeError("A collective of this chain has failed before.")
        return self._result

    def _start_next(self) -> None:
        before = moving.set(self._label)
        try:
            self._in_flight = next(self._moves)
        except StopIteration as stop:
            self._in_flight, self._result = None, stop.value
        except BaseException:
            self._in_flight = None
            raise
        finally:
            moving.reset(before)


def at_once(transfers: Sequence[Transfer]) -> Moves:
    """Several chains side by side, each with a collective in flight. Returns the last one's tensor."""
    while any(not transfer.done for transfer in transfers):
        for transfer in transfers:
            if (handle := transfer.in_flight) is not None:
                yield handle
                transfer.advance()
    return transfers[-1].finish()
