"""Collectives in flight, and chains of them.

A move is written as a generator that yields `Handle`s: it starts a collective, yields it, and is resumed once the
collective has finished. A `Transfer` drives such a generator, so a chain of collectives stays asynchronous without
callbacks.

Where the host need not wait for a collective, a whole chain is queued at its start on a stream beside the computation,
which waits for its end. What a gradient's chain goes on with after a sum, over other links or by a division, has a
stream further on, and the next chain need not wait for it. Memory goes back to the stream that it came from: what is
the computation's and a chain uses is held until the computation has waited for all of it. What is the side's can be
lent to the computation, and is free for the side's next chain as soon as it is released, whatever the computation waits
for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from terrazzo.engine.comm.label import Label, moving
from terrazzo.engine.comm.side import Side
from terrazzo.engine.comm.times import Moments, Times
from terrazzo.engine.comm.traffic import Ledger

__all__ = [
    "Handle",
    "Moves",
    "Released",
    "Transfer",
    "at_once",
    "branching",
    "converted",
    "for_computation",
    "further",
]


class Handle:
    """Collectives in flight, started together. Keeps their tensors alive until they have finished.

    Args:
        times: where the time that they are waited for is counted, if it is.
        queued: to wait for them makes a stream wait, and not the host.
        moments: what is noted by whoever does the work.
    """

    def __init__(
        self,
        works: Sequence[Any] = (),
        keep: Sequence[Tensor] = (),
        times: Times | None = None,
        queued: bool = False,
        moments: Moments | None = None,
    ) -> None:
        self._works, self._keep, self._times, self._moments, self.queued = works, keep, times, moments, queued
        self._ordinal = times.ordinal if times is not None else 0

    def wait(self, patience_s: float | None = None) -> None:
        """Return once the results may be used: by the host for gloo, by the current stream for NCCL.

        Args:
            patience_s: how long to wait, in place of the group's own time.

        Raises:
            RuntimeError: where that was too short; the group is of no use then.
        """
        times, start = self._times, time.perf_counter()
        stands = times is not None and not self.queued and (self._moments is None or self._moments.done is None)
        if times is not None and stands:
            times.recorder.waits(times.track, self._ordinal)
        for work in self._works:
            if work is not None:
                work.wait(*(() if patience_s is None else (timedelta(seconds=patience_s),)))
        self._works, self._keep = (), ()
        if times is not None:
            times.waited(start, time.perf_counter(), self._moments)
            if stands:
                times.recorder.waited(times.track, self._ordinal, start)


class Released:
    """Memory that a chain does not use any further: counted, and kept, until whose it is may have it.

    Args:
        lent: it is not the computation's, and the next chain may have it.
    """

    def __init__(self, ledger: Ledger, count_bytes: int, keep: Tensor | None = None, *, lent: bool = False) -> None:
        self._ledger, self._count_bytes, self._keep, self.lent = ledger, count_bytes, keep, lent

    def release(self) -> None:
        self._ledger.release(self._count_bytes)
        self._keep = None


@dataclass
class _Leg:
    """What a chain has queued on one stream: its end, and what is released once the computation has waited for that."""

    mark: torch.Event | None = None
    released: list[Released] = field(default_factory=list)


T = TypeVar("T")

Moves = Generator[Handle | Released, None, T]
"""A chain of collectives: yields each while it is in flight, and what it releases; returns a `T`, such as a tensor."""


class Transfer(Generic[T]):
    """A chain of collectives under way; at most one of its collectives is in flight at any time.

    Args:
        label: what is moved; that of the chain which starts this one, if not given.
        side: where it runs as a whole, as far as the host need not wait.
    """

    def __init__(self, moves: Moves[T], label: Label | None = None, side: Side | None = None) -> None:
        self._moves, self._label, self._side = moves, label or moving.get(), side
        self._in_flight: Handle | None = None
        self._result: list[T] = []  # once the chain has ended
        self._legs = [_Leg()] if side is not None else []
        self._depth, self._first_awaited = 0, False
        self._branch: ExitStack | None = None
        self._for_computation: list[Any] = []
        self._moves_nothing = True
        self._go_on()
        if self._moves_nothing:
            self.advance()

    def __del__(self) -> None:
        """A model has been dropped in the middle: what is held here goes back to the computation's memory now."""
        if self._side is not None and not sys.is_finalizing():
            for leg in self._legs:
                self._side.wait(leg.mark)

    @property
    def done(self) -> bool:
        """Whether the computation may use what has been moved."""
        return self._in_flight is None and not self._legs

    @property
    def holds_room(self) -> bool:
        """Whether it may use memory that it releases: not behind its first wait, though it may have gone further."""
        return not (self.done or self._first_awaited)

    @property
    def in_flight(self) -> Handle | None:
        """The collective that the host has to wait for, if there is one."""
        return self._in_flight

    def advance(self) -> None:
        """Wait for the collective in flight, if any, and start the next one; or for what runs beside.

        Of a chain that goes further, that is what it has queued before, and only the next time the rest.
        """
        if self._in_flight is not None:
            self._in_flight.wait()
            self._go_on()
        elif self._side is not None and self._legs:
            legs, self._legs = (self._legs, []) if self._first_awaited else (self._legs[:1], self._legs[1:])
            self._first_awaited = True
            for leg in legs:
                self._side.wait(leg.mark)
                self._give(leg.released)
            if not self._legs:
                self._for_computation = []

    def finish(self) -> T:
        """Run the chain to its end and return what it does."""
        while not self.done:
            self.advance()
        if not self._result:
            raise RuntimeError(f"Moving {self._label} has failed before: see its own error, and start all ranks again.")
        return self._result[0]

    def make_room(self) -> None:
        """Give the next chain room: what it may have, with all that this one has used if the host waits for chains."""
        if self._side is None:
            self.finish()
        for leg in self._legs:
            self._give(released for released in leg.released if released.lent)
            leg.released = [released for released in leg.released if not released.lent]

    def _give(self, released: Iterable[Released]) -> None:
        for each in released:
            each.release()

    def hold(self, make: Callable[[], Any]) -> Any:
        """Keep what `make` allocates, as the computation's memory, until the computation has waited for all legs."""
        assert self._side is not None, "chains without a side are computation"
        with self._side.home():
            self._for_computation.append(make())
        return self._for_computation[-1]

    @contextmanager
    def branching(self) -> Iterator[None]:
        """Keep open, until the end of what is inside, the legs that `further` begins there."""
        with ExitStack() as self._branch:
            yield
        self._branch = None

    def further(self) -> None:
        """Begin a leg on a stream further on, which the innermost `branching` ends; outside of one, nothing."""
        if self._branch is not None:
            self._branch.enter_context(self._one_further())

    @contextmanager
    def _one_further(self) -> Iterator[None]:
        assert self._side is not None, "chains without a side are computation"
        if self._depth + 1 == len(self._legs):
            self._legs.append(_Leg())
        with self._side.further(self._depth):
            self._depth += 1
            try:
                yield
            finally:
                self._legs[self._depth].mark = self._side.mark()
                self._depth -= 1

    def _go_on(self) -> None:
        if self._side is None:
            self._start_next()
            return
        before = _beside.set(self)
        try:
            with self._side.chain():
                try:
                    self._start_next()
                    while self._in_flight is not None and self._in_flight.queued:
                        self._in_flight.wait()
                        self._start_next()
                finally:
                    self._legs[0].mark = self._side.mark()
        finally:
            _beside.reset(before)

    def _start_next(self) -> None:
        before = moving.set(self._label)
        try:
            step = next(self._moves)
            while isinstance(step, Released):
                if self._side is None:
                    step.release()
                else:
                    self._legs[self._depth].released.append(step)
                step = next(self._moves)
            self._in_flight, self._moves_nothing = step, False
        except StopIteration as stop:
            self._in_flight, self._result = None, [stop.value]
        except BaseException:
            self._in_flight = None
            raise
        finally:
            moving.reset(before)


_beside: ContextVar[Transfer[Any] | None] = ContextVar("beside", default=None)
"""The chain that is being queued beside the computation."""


def for_computation(make: Callable[[], T]) -> T:
    """What `make` allocates for more than the chain that runs now: memory of the computation, held while that waits."""
    transfer = _beside.get()
    return make() if transfer is None else cast(T, transfer.hold(make))


@contextmanager
def branching() -> Iterator[None]:
    """What comes behind `further` inside is not waited for by what the chain that runs now does afterwards."""
    transfer = _beside.get()
    with transfer.branching() if transfer is not None else nullcontext():
        yield


def further() -> None:
    """Until the end of `branching`, what follows has a stream further on: other chains need not wait for it.

    All of it has to be queued, and nothing that it uses is released: what it ends with has that memory.
    """
    if (transfer := _beside.get()) is not None:
        transfer.further()


def converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype`, for computation."""
    if values.dtype == dtype:
        return values
    return for_computation(lambda: torch.empty_like(values, dtype=dtype)).copy_(values)


def at_once(transfers: Sequence[Transfer[object]]) -> Moves[None]:
    """Several chains side by side, each with a collective in flight."""
    while any(not transfer.done for transfer in transfers):
        for transfer in transfers:
            if (handle := transfer.in_flight) is not None:
                yield handle
                transfer.advance()
