"""Collectives in flight, and chains of them.

A move is written as a generator: it starts a collective, yields its `Handle`, and is resumed once the collective has
finished. A `Transfer` drives such a generator, so a chain of collectives stays asynchronous without callbacks.

On CPU the host waits for each collective: every `advance` moves a chain one collective on. On CUDA the host need not
wait: a whole chain is queued at its start on a communication stream, and the computation waits for its end. After its
first sum, the tail of a gradient's chain may run on further streams, over other links or with a division: the next
chain does not wait for that.

A worked example, the last reduction of a unit's gradient under `hybrid_shard`, with shards inside of a machine and
replicas between machines. As a chain, of `unreduced` in memory that the communication stream lent to the computation:

    part = yield from shards.reduce_scatter(unreduced, dtype)      # yields one Handle
    yield Released(ledger, unreduced.nbytes, unreduced, lent=True)
    with tail():
        next_stream()                                              # else the gather of unit 1 would wait for machines
        total = yield from replicas.all_reduce(part, dtype, n)     # on CUDA it calls next_stream() before it divides
    return total                                                   # allocated by `outlives_chain`: it is used later

and on CUDA, while backward goes on from unit 2 to unit 1; time runs to the right:

    computation     backward of 2 |          | backward of 1                         | uses `total`
    first stream                  | scatter 2 | gather 1 | ...                       |
    second stream                             | all-reduce 2                |        |
    third stream                                                            | divide |
    the schedule                  Transfer()  make_room()         advance()          advance(), or finish()
    what it does                  queues all  `unreduced` may be  waits for          waits for the
                                  of this     reused by gather 1  the first stream   others: done

Who owns memory decides when it may go. Memory goes back to the stream that allocated it: so what the chain returns is
allocated for the computation, `outlives_chain`, and held until the computation has waited for the whole chain; so are
tensors of the computation that the chain reads. Memory of the communication stream can be lent to the computation; the
next chain may reuse it as soon as it is released, whatever the computation waits for.
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

from terrazzo.engine.comm.comm_streams import CommStreams
from terrazzo.engine.instrumentation.times import Moments, Times
from terrazzo.engine.instrumentation.traffic import Ledger
from terrazzo.engine.labels.label import Label, moving

__all__ = [
    "Handle",
    "Moves",
    "Released",
    "Transfer",
    "at_once",
    "converted",
    "next_stream",
    "outlives_chain",
    "tail",
]


class Handle:
    """Collectives in flight, started together. Keeps their tensors alive until they have finished.

    Args:
        times: where the time that they are waited for is counted, if it is.
        queued: waiting for them makes a stream wait, and not the host.
        moments: when the work began and ended, noted by the thread that does it.
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

    @property
    def ended(self) -> bool:
        """Whether the thread that does the work has noted its end; others note none."""
        return self._moments is not None and self._moments.done is not None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once the results may be used: by the host for gloo, by the current stream for NCCL.

        Args:
            timeout_s: how long to wait, in place of the group's own time.

        Raises:
            RuntimeError: where that was too short; the group is of no use then.
        """
        times, start = self._times, time.perf_counter()
        stands = times is not None and not self.queued and (self._moments is None or self._moments.done is None)
        if times is not None and stands:
            times.recorder.waits(times.track, self._ordinal)
        for work in self._works:
            if work is not None:
                work.wait(*(() if timeout_s is None else (timedelta(seconds=timeout_s),)))
        self._works, self._keep = (), ()
        if times is not None:
            times.waited(start, time.perf_counter(), self._moments)
            if stands:
                times.recorder.waited(times.track, self._ordinal, start)


class Released:
    """Memory that a chain no longer uses. It stays counted, and allocated, until its owner may reuse it.

    Args:
        lent: the communication stream owns it, and the next chain may reuse it.
    """

    def __init__(self, ledger: Ledger, count_bytes: int, keep: Tensor | None = None, *, lent: bool = False) -> None:
        self._ledger, self._count_bytes, self._keep, self.lent = ledger, count_bytes, keep, lent

    def release(self) -> None:
        self._ledger.release(self._count_bytes)
        self._keep = None


@dataclass
class _Stretch:
    """The part of a chain on one stream: an event at its end, and memory to release once that was waited for."""

    mark: torch.Event | None = None
    released: list[Released] = field(default_factory=list)


T = TypeVar("T")

Moves = Generator[Handle | Released, None, T]
"""A chain of collectives: yields each while it is in flight, and what it releases; returns a `T`, such as a tensor."""


class Transfer(Generic[T]):
    """A chain of collectives under way; at most one of its collectives is in flight at any time.

    Args:
        label: what is moved; that of the chain which starts this one, if not given.
        comm_streams: where it runs as a whole, as far as the host need not wait.
    """

    def __init__(self, moves: Moves[T], label: Label | None = None, comm_streams: CommStreams | None = None) -> None:
        self._moves, self._label, self._streams = moves, label or moving.get(), comm_streams
        self._in_flight: Handle | None = None
        self._result: list[T] = []  # once the chain has ended
        self._stretches = [_Stretch()] if comm_streams is not None else []
        self._depth, self._first_awaited = 0, False
        self._tail: ExitStack | None = None
        self._outlive: list[Any] = []
        self._moves_nothing = True
        self._go_on()
        if self._moves_nothing:
            self.advance()

    def __del__(self) -> None:
        """The model has been dropped meanwhile: the computation waits, since memory held here goes back to it now."""
        if self._streams is not None and not sys.is_finalizing():
            for stretch in self._stretches:
                self._streams.wait(stretch.mark)

    @property
    def done(self) -> bool:
        """Whether the computation may use what has been moved."""
        return self._in_flight is None and not self._stretches

    @property
    def holds_room(self) -> bool:
        """Whether it may still use memory that it will release: not after the first wait, though a part may run on."""
        return not (self.done or self._first_awaited)

    @property
    def in_flight(self) -> Handle | None:
        """The collective that the host has to wait for, if there is one."""
        return self._in_flight

    def advance(self) -> None:
        """Wait for the collective in flight, if any, and start the next one; on streams, wait for the chain.

        Of a chain on several streams, the first call waits for the part on the first, and the next call for the rest.
        """
        if self._in_flight is not None:
            self._in_flight.wait()
            self._go_on()
        elif self._streams is not None and self._stretches:
            count = len(self._stretches) if self._first_awaited else 1
            stretches, self._stretches = self._stretches[:count], self._stretches[count:]
            self._first_awaited = True
            for stretch in stretches:
                self._streams.wait(stretch.mark)
                self._give(stretch.released)
            if not self._stretches:
                self._outlive = []

    def advance_if_ended(self) -> None:
        """Start the next collective if the one in flight is known to have ended; never wait."""
        if self._in_flight is not None and self._in_flight.ended:
            self.advance()

    def finish(self) -> T:
        """Run the chain to its end and return its result."""
        while not self.done:
            self.advance()
        if not self._result:
            raise RuntimeError(f"Moving {self._label} has failed before: see its own error, and start all ranks again.")
        return self._result[0]

    def make_room(self) -> None:
        """Release lent memory for the next chain; where the host does the work, finish this chain first."""
        if self._streams is None:
            self.finish()
        for stretch in self._stretches:
            self._give(released for released in stretch.released if released.lent)
            stretch.released = [released for released in stretch.released if not released.lent]

    def _give(self, released: Iterable[Released]) -> None:
        for each in released:
            each.release()

    def outlive(self, make: Callable[[], Any]) -> Any:
        """Have `make` allocate memory of the computation; hold it until the computation has waited for the chain."""
        assert self._streams is not None, "without streams a chain runs in the computation"
        with self._streams.for_computation():
            self._outlive.append(make())
        return self._outlive[-1]

    @contextmanager
    def tail(self) -> Iterator[None]:
        """Keep stretches that `next_stream` begins open until the end of the block."""
        with ExitStack() as self._tail:
            yield
        self._tail = None

    def next_stream(self) -> None:
        """Begin a stretch on a further stream, until the `tail` ends; outside of one, do nothing."""
        if self._tail is not None:
            self._tail.enter_context(self._on_next_stream())

    @contextmanager
    def _on_next_stream(self) -> Iterator[None]:
        assert self._streams is not None, "without streams a chain runs in the computation"
        if self._depth + 1 == len(self._stretches):
            self._stretches.append(_Stretch())
        with self._streams.further(self._depth):
            self._depth += 1
            try:
                yield
            finally:
                self._stretches[self._depth].mark = self._streams.mark()
                self._depth -= 1

    def _go_on(self) -> None:
        if self._streams is None:
            self._start_next()
            return
        before = _queued_chain.set(self)
        try:
            with self._streams.chain():
                try:
                    self._start_next()
                    while self._in_flight is not None and self._in_flight.queued:
                        self._in_flight.wait()
                        self._start_next()
                finally:
                    self._stretches[0].mark = self._streams.mark()
        finally:
            _queued_chain.reset(before)

    def _start_next(self) -> None:
        before = moving.set(self._label)
        try:
            step = next(self._moves)
            while isinstance(step, Released):
                if self._streams is None:
                    step.release()
                else:
                    self._stretches[self._depth].released.append(step)
                step = next(self._moves)
            self._in_flight, self._moves_nothing = step, False
        except StopIteration as stop:
            self._in_flight, self._result = None, [stop.value]
        except BaseException:
            self._in_flight = None
            raise
        finally:
            moving.reset(before)


_queued_chain: ContextVar[Transfer[Any] | None] = ContextVar("queued_chain", default=None)
"""The chain that is being queued beside the computation."""


def outlives_chain(make: Callable[[], T]) -> T:
    """Have `make` allocate memory for after the running chain: the computation's, held until it has waited for that.

    What `make` only returns, such as tensors of the computation that the chain reads, is held as long.
    """
    transfer = _queued_chain.get()
    return make() if transfer is None else cast(T, transfer.outlive(make))


@contextmanager
def tail() -> Iterator[None]:
    """Let the running chain go on to further streams inside, by `next_stream`; what it does after the block does not
    wait for these. The block is the end of a chain but for what that releases.
    """
    transfer = _queued_chain.get()
    with transfer.tail() if transfer is not None else nullcontext():
        yield


def next_stream() -> None:
    """Continue the running chain on a further stream until the end of its `tail`: other chains do not wait for it.

    Outside of a tail, and where the host does the work, it stays where it is. On CUDA all of the tail must be queued
    work, and it must release none of the memory that it uses, which the chain's result holds.
    """
    if (transfer := _queued_chain.get()) is not None:
        transfer.next_stream()


def converted(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype`, for computation."""
    if values.dtype == dtype:
        return values
    return outlives_chain(lambda: torch.empty_like(values, dtype=dtype)).copy_(values)


def at_once(transfers: Sequence[Transfer[object]]) -> Moves[None]:
    """Run several chains at a time, each with one collective in flight."""
    while any(not transfer.done for transfer in transfers):
        for transfer in transfers:
            if (handle := transfer.in_flight) is not None:
                yield handle
                transfer.advance()
