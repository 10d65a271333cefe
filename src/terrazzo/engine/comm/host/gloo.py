"""Collectives over gloo: ranks of one machine read each other's memory, machines send each other chunks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.comm.failed_exchanges import Exchange
from terrazzo.engine.comm.host.announced_data import Announcement, Stamp, announced_as
from terrazzo.engine.comm.host.columns import Columns, columns_of
from terrazzo.engine.comm.host.neighbours import Memory, Neighbour, find_neighbours
from terrazzo.engine.comm.links import Links
from terrazzo.engine.comm.sums import add_in_order, divide
from terrazzo.engine.comm.transfer import Handle, Moves
from terrazzo.engine.instrumentation.times import Moments, Times
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.engine.labels.label import moving
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.pages import use_large_pages
from terrazzo.engine.runtime.process_groups import timeout_s_of
from terrazzo.engine.runtime.worker import Worker

__all__ = ["NEAR_BLOCK_BYTES", "GlooCollectives"]

_Source = Tensor | Memory
"""A rank's chunk: in memory of this process, or of another."""

NEAR_BLOCK_BYTES = 1 << 20
"""Read at a time from another process when the next thing is to add it up: half of a core's second-level cache."""


class GlooCollectives(Collectives):
    """Each chunk goes straight from its source memory to its place in the result, or into the sum.

    Ranks on one machine read each other's memory (see `neighbours`). Between machines gloo's point-to-point carries the
    chunks; its own all-gather goes through a hidden full copy and its reduce-scatter through a full all-reduce
    (docs/decisions.md). Over many machines exchanges go by `columns`. Gathers and reductions have a thread each, which
    reads and sums while the rank computes.
    """

    def __init__(self, links: Links, traffic: Traffic, ledger: Ledger) -> None:
        super().__init__(links, traffic, ledger)
        kinds = ("gather", "reduce") if self.size > 1 else ()
        self._near: dict[int, Neighbour] = {}
        self._columns: Columns | None = None
        links.mesh_groups.add(links.group, functools.partial(_hang_up, self._near))
        if kinds:
            self._find_ways(kinds)
        self._far = [rank for rank in range(self.size) if rank != self.rank and rank not in self._near]
        break_off = links.mesh_groups.break_off  # which does not hold what owns the threads
        self._workers = {kind: Worker(f"terrazzo-{kind}", break_off=break_off) for kind in kinds}
        self._counts = dict.fromkeys(kinds, 0)

    def _find_ways(self, kinds: Sequence[str]) -> None:
        """Find out which ranks are neighbours, and whether exchanges go by columns."""
        ranks, timeout_s = self.links.ranks, timeout_s_of(self.group, HOST)
        self._near.update(find_neighbours(self.rank, ranks, self.gather_rows, kinds, timeout_s))
        self._columns = columns_of(self.rank, ranks, self._near, self.gather_rows)
        if self._columns is not None and self._columns.width == 1:
            self._near.clear()

    def _standing_still(self) -> Iterable[str]:
        for neighbour in self._near.values():
            if (why := neighbour.why_stopped) is not None:
                yield f"{neighbour.name}: {why}"

    def _all_gather(self, full: Tensor, kind: str) -> Moves[Tensor]:
        chunks, times, turn = self._chunks(full), self.traffic.times_of(self.axis, kind), _turn_of(kind)
        if (columns := self._columns) is not None:
            stamp = self._stamp(turn)
            go = functools.partial(columns.gather, self.group, stamp, self._near, full, turn)
            yield self._in_thread(turn, self.links.begin(stamp.label), lambda _: go(), [full], times)
            return full

        yield self._exchange(turn, [chunks[self.rank]] * self.size, chunks, functools.partial(_fill, chunks), times)
        return full

    def _reduce_scatter(self, full: Tensor, dtype: torch.dtype, kind: str) -> Moves[Tensor]:
        total = full.new_empty(full.numel() // self.size, dtype=dtype)
        return (yield from self._sum_chunks(full, use_large_pages(total), 1, kind))

    def _all_reduce(self, full: Tensor, dtype: torch.dtype, denominator: float) -> Moves[Tensor]:
        if full.dtype != dtype:
            return (yield from super()._all_reduce(full, dtype, denominator))
        yield from self._sum_chunks(full, self._chunks(full)[self.rank], denominator, "all_reduce")
        return (yield from self._all_gather(full, "all_reduce"))

    def _all_to_all(
        self, sent: Tensor, sent_numels: Sequence[int], received: Tensor, received_numels: Sequence[int], kind: str
    ) -> Moves[None]:
        going, arriving = sent.split(list(sent_numels)), received.split(list(received_numels))
        arriving[self.rank].copy_(going[self.rank])
        sizes, times = [chunk.nbytes for chunk in arriving], self.traffic.times_of(self.axis, kind)
        yield self._exchange(_turn_of(kind), going, arriving, functools.partial(_fill, arriving), times, sizes)

    def _sum_chunks(self, full: Tensor, total: Tensor, denominator: float, kind: str) -> Moves[Tensor]:
        """Sum this rank's chunk of every rank's `full` into `total`, which may be that chunk, and divide."""
        chunks, times = self._chunks(full), self.traffic.times_of(self.axis, kind)
        with self.ledger.holding(self.receive_bytes(full.nbytes)):
            sizes = [self._receive_bytes(rank, total.numel() * full.itemsize) for rank in range(self.size)]
            if (columns := self._columns) is not None:  # they have memory of their own for what comes from afar
                sizes = [size if rank in self._near else 0 for rank, size in enumerate(sizes)]
            space = [use_large_pages(full.new_empty(size_bytes // full.itemsize)) for size_bytes in sizes]
            space[self.rank] = chunks[self.rank]

            def add(sources: Sequence[_Source]) -> None:
                step = max(1, NEAR_BLOCK_BYTES // full.itemsize)
                for start in range(0, total.numel(), step):
                    stop = min(start + step, total.numel())
                    parts = [
                        source.read(start * full.itemsize, scratch[: stop - start])
                        if isinstance(source, Memory)
                        else source[start:stop]
                        for source, scratch in zip(sources, space, strict=True)
                    ]
                    add_in_order(parts, total[start:stop])
                    divide(total[start:stop], denominator)

            if columns is None:
                yield self._exchange("reduce", chunks, space, add, times)
            else:
                stamp = self._stamp("reduce")
                go = functools.partial(columns.reduce, self.group, stamp, self._near, full, add)
                begun = self.links.begin(stamp.label)
                yield self._in_thread("reduce", begun, lambda _: go(), [full, *space], times)
        return total

    def receive_bytes(self, full_bytes: int) -> int:
        staging_bytes = self._columns.staging_chunks * (full_bytes // self.size) if self._columns is not None else 0
        return staging_bytes + sum(self._receive_bytes(rank, full_bytes // self.size) for rank in range(self.size))

    def _receive_bytes(self, rank: int, chunk_bytes: int) -> int:
        """Memory for what comes from `rank` to be summed: all of it, or a block at a time."""
        return chunk_bytes if rank in self._far else min(chunk_bytes, NEAR_BLOCK_BYTES) if rank in self._near else 0

    def _exchange(
        self,
        kind: str,
        outgoing: Sequence[Tensor],
        space: Sequence[Tensor],
        use: Callable[[Sequence[_Source]], None],
        times: Times,
        sizes: Sequence[int] | None = None,
    ) -> Handle:
        """Offer `outgoing[rank]` to each other rank, and call `use` with what each offers this one, in rank order.

        Args:
            kind: of collective: those of one kind come in the same order on every rank.
            space: where chunks from other machines arrive; this rank's own entry is its own chunk.
            sizes: bytes that each rank offers; by default as many as this one keeps.
        """
        stamp, group, far = self._stamp(kind), self.group, self._far
        label, first, then = stamp.label, stamp.first, stamp.then
        begun = self.links.begin(label)
        heard = {rank: Announcement(label, space[rank].nbytes, self.links.ranks[rank]) for rank in far}
        with begun.part():
            announcements = {rank: group.recv([heard[rank].message], rank, first) for rank in far}
            coming = [group.recv([space[rank]], rank, then(space[rank].nbytes)) for rank in far]
            announced = [group.send([announced_as(label, outgoing[rank])], rank, first) for rank in far]
            going = announced + [group.send([outgoing[rank]], rank, then(outgoing[rank].nbytes)) for rank in far]
        offered_bytes = [outgoing[self.rank].nbytes] * self.size if sizes is None else sizes

        def exchange(moments: Moments) -> None:
            for rank, neighbour in self._near.items():
                neighbour.offer(kind, outgoing[rank], label)
            for rank, work in announcements.items():
                work.wait()
                heard[rank].check()
            sources: list[_Source] = list(space)
            for rank, neighbour in self._near.items():
                sources[rank] = neighbour.offered(kind, offered_bytes[rank], label)
            moments.ready = time.perf_counter()
            for work in coming:
                work.wait()
            use(sources)
            for neighbour in self._near.values():
                neighbour.say_taken(kind)
            for neighbour in self._near.values():
                neighbour.await_taken(kind, label)
            for work in going:
                work.wait()

        return self._in_thread(kind, begun, exchange, [*outgoing, *space], times)

    def _stamp(self, kind: str) -> Stamp:
        """The mark of the messages of an exchange that begins now."""
        self._counts[kind] += 1
        return Stamp.of(self.label, self.links.mesh_groups.shared, [*self._counts].index(kind), self._counts[kind])

    def _in_thread(
        self, kind: str, begun: Exchange, exchange: Callable[[Moments], None], keep: Sequence[Tensor], times: Times
    ) -> Handle:
        """Have the thread for `kind` do the rest of `begun`; a failure is one for the neighbours as well."""
        moments, ordinal = Moments(), times.ordinal

        def job() -> None:
            moments.begun = start = time.perf_counter()
            try:
                with begun.part(last=True):
                    exchange(moments)
            except BaseException:
                _hang_up(self._near)
                raise
            moments.done = time.perf_counter()
            times.recorder.done(times.track, ordinal, start, moments.ready)

        return Handle([self._workers[kind].submit(job)], keep, times, moments=moments)


def _fill(chunks: Sequence[Tensor], sources: Sequence[_Source]) -> None:
    """Read what neighbours offer; what others have sent is in its place."""
    for chunk, source in zip(chunks, sources, strict=True):
        if isinstance(source, Memory):
            source.read(0, chunk)


def _turn_of(kind: str) -> Literal["gather", "reduce"]:
    """The thread on which exchanges of a kind run, one after the other.

    Updated weights share that of gradients, though they are gathered: a rank that has left out a step meets another's
    updated weights with its gradient, and both raise. On threads of their own, both would wait.
    """
    return "reduce" if kind == "reduce_scatter" or moving.get().purpose is Purpose.UPDATED else "gather"


def _hang_up(near: Mapping[int, Neighbour]) -> None:
    for neighbour in near.values():
        neighbour.hang_up()
