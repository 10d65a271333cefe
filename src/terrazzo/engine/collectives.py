"""The only caller of torch.distributed collectives: one algorithm per backend, every byte counted.

All sums run in rank order along an axis, ((r0 + r1) + r2) + ..., on every backend but NCCL, which is what makes results
reproducible bit by bit (see docs/numerics.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.pages import use_large_pages
from terrazzo.engine.peers import Memory, find_neighbours
from terrazzo.engine.transfer import Handle, Ledger, Moves, Traffic
from terrazzo.engine.worker import Worker

__all__ = ["Collectives", "backend_of", "collectives_for", "divide"]


class Collectives(ABC):
    """Collectives along one mesh axis. Tensors are 1-D, contiguous, and divide evenly over the axis's ranks."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, ledger: Ledger) -> None:
        self.group, self.traffic, self.ledger = group, traffic, ledger
        self.size, self.rank = group.size(), group.rank()

    def all_gather(self, full: Tensor) -> Moves:
        """Fill `full` from every rank's own chunk of it, in place."""
        self.traffic.record("all_gather", self._share_bytes(full))
        yield from self._all_gather(full)
        return full

    def reduce_scatter(self, full: Tensor, dtype: torch.dtype) -> Moves:
        """This rank's chunk of the sum of every rank's `full`, as a new tensor of `dtype`."""
        self.traffic.record("reduce_scatter", self._share_bytes(full))
        return (yield from self._reduce_scatter(full, dtype))

    def all_reduce(self, full: Tensor, dtype: torch.dtype, denominator: float) -> Moves:
        """The sum of every rank's `full` divided by `denominator`, in `dtype`; may reuse `full`'s memory."""
        self.traffic.record("all_reduce", 2 * self._share_bytes(full))
        return (yield from self._all_reduce(full, dtype, denominator))

    def maximum(self, values: Tensor) -> Tensor:
        """The elementwise maximum over the ranks, for small control data; blocks."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        self.traffic.record("control", values.nbytes)
        return values

    def gather_rows(self, values: Tensor) -> Tensor:
        """Every rank's `values`, stacked in rank order along a new first dim, for small control data; blocks."""
        rows = values.new_empty((self.size, values.numel()))
        _all_gather_single(rows.view(-1), values.reshape(-1), group=self.group)
        self.traffic.record("control", values.nbytes)
        return rows.view(self.size, *values.shape)

    def broadcast(self, values: Tensor) -> None:
        """Overwrite `values` with those of the axis's first rank; blocks."""
        dist.broadcast(values, group=self.group, group_src=0)
        self.traffic.record("broadcast", values.nbytes if self.rank == 0 else 0)

    @abstractmethod
    def _all_gather(self, full: Tensor) -> Moves: ...

    @abstractmethod
    def _reduce_scatter(self, full: Tensor, dtype: torch.dtype) -> Moves: ...

    all_reduce_steps = 2
    """Collectives in a row that an all-reduce is made of."""

    @abstractmethod
    def receive_bytes(self, full_bytes: int) -> int:
        """Memory that summing a tensor of `full_bytes` needs besides it and its result."""

    def _all_reduce(self, full: Tensor, dtype: torch.dtype, denominator: float) -> Moves:
        own = yield from self._reduce_scatter(full, dtype)
        self._chunks(full)[self.rank].copy_(divide(own, denominator))
        yield from self._all_gather(full)
        return full.to(dtype)

    def _chunks(self, full: Tensor) -> list[Tensor]:
        return list(full.view(self.size, -1).unbind())

    def _share_bytes(self, full: Tensor) -> int:
        return full.nbytes // self.size * (self.size - 1)


def _add(parts: Sequence[Tensor], total: Tensor) -> None:
    """Sum two or more tensors in order, in the dtype of `total`, which may share memory with any of them."""
    begun = parts[0].to(total.dtype)
    for part in parts[1:-1]:
        begun = torch.add(begun, part)
    torch.add(begun, parts[-1], out=total)


_Source = Tensor | Memory
"""A rank's chunk: in memory of this process, or of another."""

_BLOCK_BYTES = 1 << 20
"""Read at a time from another process when the next thing is to add it up: half of a core's second-level cache."""


class GlooCollectives(Collectives):
    """Each chunk goes straight from its source memory to its place in the result, or into the sum.

    Ranks on one machine read each other's memory (see `peers`). Between machines gloo's point-to-point carries the
    chunks; its own all-gather goes through a hidden full copy and its reduce-scatter through a full all-reduce
    (docs/decisions.md). Gathers and reductions have a thread each, which reads and sums while the rank computes.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, ledger: Ledger) -> None:
        super().__init__(group, traffic, ledger)
        kinds = ("gather", "reduce") if self.size > 1 else ()
        self._near = find_neighbours(self.rank, self.gather_rows, kinds, _timeout_s(group)) if kinds else {}
        self._far = [rank for rank in range(self.size) if rank != self.rank and rank not in self._near]
        self._workers = {kind: Worker(f"terrazzo-{kind}", meets_ranks=True) for kind in kinds}
        self._tags = {"gather": 0, "reduce": 1}

    def _all_gather(self, full: Tensor) -> Moves:
        chunks = self._chunks(full)

        def fill(sources: Sequence[_Source]) -> None:
            for chunk, source in zip(chunks, sources, strict=True):
                if isinstance(source, Memory):
                    source.read(0, chunk)

        yield self._exchange("gather", [chunks[self.rank]] * self.size, chunks, fill)
        return full

    def _reduce_scatter(self, full: Tensor, dtype: torch.dtype) -> Moves:
        total = full.new_empty(full.numel() // self.size, dtype=dtype)
        return (yield from self._sum_chunks(full, use_large_pages(total), denominator=1))

    def _all_reduce(self, full: Tensor, dtype: torch.dtype, denominator: float) -> Moves:
        if full.dtype != dtype:
            return (yield from super()._all_reduce(full, dtype, denominator))
        yield from self._sum_chunks(full, self._chunks(full)[self.rank], denominator)
        return (yield from self._all_gather(full))

    def _sum_chunks(self, full: Tensor, total: Tensor, denominator: float) -> Moves:
        """Sum this rank's chunk of every rank's `full` into `total`, which may be that chunk, and divide."""
        chunks = self._chunks(full)
        with self.ledger.holding(self.receive_bytes(full.nbytes)):
            sizes = [self._receive_bytes(rank, total.numel() * full.itemsize) for rank in range(self.size)]
            space = [use_large_pages(full.new_empty(size_bytes // full.itemsize)) for size_bytes in sizes]
            space[self.rank] = chunks[self.rank]

            def add(sources: Sequence[_Source]) -> None:
                step = max(1, _BLOCK_BYTES // full.itemsize)
                for start in range(0, total.numel(), step):
                    stop = min(start + step, total.numel())
                    parts = [
                        source.read(start * full.itemsize, scratch[: stop - start])
                        if isinstance(source, Memory)
                        else source[start:stop]
                        for source, scratch in zip(sources, space, strict=True)
                    ]
                    _add(parts, total[start:stop])
                    divide(total[start:stop], denominator)

            yield self._exchange("reduce", chunks, space, add)
        return total

    def receive_bytes(self, full_bytes: int) -> int:
        return sum(self._receive_bytes(rank, full_bytes // self.size) for rank in range(self.size))

    def _receive_bytes(self, rank: int, chunk_bytes: int) -> int:
        """Memory for what comes from `rank` to be summed: all of it, or a block at a time."""
        return chunk_bytes if rank in self._far else min(chunk_bytes, _BLOCK_BYTES) if rank in self._near else 0

    def _exchange(
        self, kind: str, outgoing: Sequence[Tensor], space: Sequence[Tensor], use: Callable[[Sequence[_Source]], None]
    ) -> Handle:
        """Offer `outgoing[rank]` to each other rank, and call `use` with what each offers this one, in rank order.

        Args:
            kind: of collective: those of one kind come in the same order on every rank.
            space: where chunks from other machines arrive; this rank's own entry is its own chunk.
        """
        tag = self._tags[kind] = (self._tags[kind] + 2) % (1 << 30)
        coming = [self.group.recv([space[rank]], rank, tag) for rank in self._far]
        going = [self.group.send([outgoing[rank]], rank, tag) for rank in self._far]

        def exchange() -> None:
            for rank, neighbour in self._near.items():
                neighbour.offer(kind, outgoing[rank])
            for work in coming:
                work.wait()
            sources: list[_Source] = list(space)
            for rank, neighbour in self._near.items():
                sources[rank] = neighbour.offered(kind, outgoing[self.rank].nbytes)
            use(sources)
            for neighbour in self._near.values():
                neighbour.say_taken(kind)
            for neighbour in self._near.values():
                neighbour.await_taken(kind)
            for work in going:
                work.wait()

        def job() -> None:
            try:
                exchange()
            except BaseException:
                for neighbour in self._near.values():
                    neighbour.hang_up()
                raise

        return Handle(self.traffic, [self._workers[kind].submit(job)], [*outgoing, *space])


class NativeCollectives(Collectives):
    """The backend's own collectives: NCCL, and the `fake` backend of simulations."""

    all_reduce_steps = 1

    def _all_gather(self, full: Tensor) -> Moves:
        own = full.view(self.size, -1)[self.rank]
        yield Handle(self.traffic, [_all_gather_single(full, own, group=self.group, async_op=True)], [full])
        return full

    def _reduce_scatter(self, full: Tensor, dtype: torch.dtype) -> Moves:
        own = full.new_empty(full.numel() // self.size)
        yield Handle(self.traffic, [_reduce_scatter_single(own, full, group=self.group, async_op=True)], [full, own])
        return own.to(dtype)

    def receive_bytes(self, full_bytes: int) -> int:
        return 0

    def _all_reduce(self, full: Tensor, dtype: torch.dtype, denominator: float) -> Moves:
        yield Handle(self.traffic, [dist.all_reduce(full, group=self.group, async_op=True)], [full])
        return divide(full.to(dtype), denominator)


class ThreadedCollectives(Collectives):
    """For torch's in-process threaded group, where tests run many ranks: blocking, summed in rank order."""

    def _all_gather(self, full: Tensor) -> Moves:
        own = self._chunks(full)[self.rank]
        yield Handle(self.traffic, [_all_gather_single(full, own, group=self.group)])
        return full

    def _reduce_scatter(self, full: Tensor, dtype: torch.dtype) -> Moves:
        received = torch.empty_like(full)
        with self.ledger.holding(received.nbytes):
            yield Handle(self.traffic, [dist.all_to_all_single(received, full, group=self.group)])
            total = full.new_empty(full.numel() // self.size, dtype=dtype)
            _add(self._chunks(received), total)
            return total

    def receive_bytes(self, full_bytes: int) -> int:
        return full_bytes


def _timeout_s(group: dist.ProcessGroup) -> float:
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout.total_seconds()


def divide(total: Tensor, denominator: float) -> Tensor:
    """`total` divided in place; left alone by a denominator of one."""
    return total if denominator == 1 else total.div_(denominator)


_KINDS: dict[str, type[Collectives]] = {
    "gloo": GlooCollectives,
    "nccl": NativeCollectives,
    "fake": NativeCollectives,
    "threaded": ThreadedCollectives,
}


def collectives_for(group: dist.ProcessGroup, device: torch.device, traffic: Traffic, ledger: Ledger) -> Collectives:
    """The collectives of the backend that serves `device` in `group`."""
    return _KINDS.get(backend_of(group, device), NativeCollectives)(group, traffic, ledger)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves `device` in `group`, such as `gloo`."""
    config = str(dist.get_backend_config(group))
    by_device = dict(pair.split(":") for pair in config.split(",") if ":" in pair)
    return by_device.get(device.type, dist.get_backend(group))


# torch 2.13 renamed these two; the old names warn there and are the only ones before.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
