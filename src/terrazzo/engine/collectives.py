"""The only caller of torch.distributed collectives: one algorithm per backend, every byte counted.

A move is written as a generator that yields `Handle`s: it starts a collective, yields it, and is resumed once the
collective has finished. A `Transfer` drives such a generator, so a chain of collectives stays asynchronous without
threads or callbacks. All sums run in rank order along an axis, ((r0 + r1) + r2) + ..., on every backend but NCCL,
which is what makes results reproducible bit by bit (see docs/numerics.md).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.pages import use_large_pages

__all__ = ["Collectives", "Handle", "Ledger", "Moves", "Traffic", "Transfer", "backend_of", "collectives_for", "divide"]


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
    def holding(self, tensor: Tensor) -> Iterator[Tensor]:
        self.take(tensor.nbytes)
        try:
            yield tensor
        finally:
            self.give(tensor.nbytes)


class Handle:
    """Collectives in flight, started together. Keeps their tensors alive until they have finished."""

    def __init__(self, traffic: Traffic, works: Sequence[Any], keep: Sequence[Tensor] = ()) -> None:
        self._traffic, self._works, self._keep = traffic, works, keep

    def wait(self) -> None:
        """Return once the results may be used: by the host for gloo, by the current stream for NCCL."""
        start = time.perf_counter()
        for work in self._works:
            if work is not None:
                work.wait()
        self._works, self._keep = (), ()
        self._traffic.wait_s += time.perf_counter() - start


Moves = Generator[Handle, None, Tensor]
"""A chain of collectives: yields each while it is in flight, returns the moved tensor."""


class Transfer:
    """A chain of collectives under way; at most one of its collectives is in flight at any time."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._in_flight: Handle | None = None
        self._result: Tensor | None = None
        self._start_next()

    @property
    def done(self) -> bool:
        return self._in_flight is None

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
        try:
            self._in_flight = next(self._moves)
        except StopIteration as stop:
            self._in_flight, self._result = None, stop.value
        except BaseException:
            self._in_flight = None
            raise


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

    def _sum(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        total = torch.add(parts[0].to(dtype), parts[1])
        for part in parts[2:]:
            total.add_(part)
        return total


class GlooCollectives(Collectives):
    """Point-to-point over gloo: each chunk goes straight from its source memory to its place in the result.

    gloo's own all-gather goes through a hidden full copy and its reduce-scatter through a full all-reduce; sending
    chunks directly takes about a third of the time (docs/decisions.md).
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, ledger: Ledger) -> None:
        super().__init__(group, traffic, ledger)
        self._tag = {"gather": 0, "scatter": 1}

    def _all_gather(self, full: Tensor) -> Moves:
        chunks = self._chunks(full)
        yield self._exchange("gather", [chunks[self.rank]] * self.size, chunks)
        return full

    def _reduce_scatter(self, full: Tensor, dtype: torch.dtype) -> Moves:
        with self._receiving(full) as parts:
            yield self._exchange("scatter", self._chunks(full), parts)
            if self.size == 2 and dtype == full.dtype:  # the sum fits into what was received: no new memory
                return torch.add(parts[0], parts[1], out=parts[1 - self.rank])
            return self._sum(parts, dtype)

    def _all_reduce(self, full: Tensor, dtype: torch.dtype, denominator: float) -> Moves:
        if full.dtype != dtype:
            return (yield from super()._all_reduce(full, dtype, denominator))
        with self._receiving(full) as parts:
            yield self._exchange("scatter", self._chunks(full), parts)
            for part in parts[1:-1]:
                parts[0].add_(part)
            divide(torch.add(parts[0], parts[-1], out=parts[self.rank]), denominator)
        return (yield from self._all_gather(full))

    @contextmanager
    def _receiving(self, full: Tensor) -> Iterator[list[Tensor]]:
        """This rank's chunk of every rank's `full`, in rank order: its own, and memory for the others'."""
        chunks = self._chunks(full)
        space = use_large_pages(full.new_empty((self.size - 1, chunks[0].numel())))
        with self.ledger.holding(space) as received:
            yield [*received[: self.rank], chunks[self.rank], *received[self.rank :]]

    def receive_bytes(self, full_bytes: int) -> int:
        return full_bytes // self.size * (self.size - 1)

    def _exchange(self, kind: str, outgoing: list[Tensor], incoming: list[Tensor]) -> Handle:
        tag = self._tag[kind] = (self._tag[kind] + 2) % (1 << 30)
        works: list[Any] = []
        for distance in range(1, self.size):
            target, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            works.append(self.group.recv([incoming[source]], source, tag))
            works.append(self.group.send([outgoing[target]], target, tag))
        return Handle(self.traffic, works, [*outgoing, *incoming])


class NativeCollectives(Collectives):
    """The backend's own collectives: NCCL, and the `fake` backend of simulations."""

    all_reduce_steps = 1

    def _all_gather(self, full: Tensor) -> Moves:
        own = self._chunks(full)[self.rank]
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
        with self.ledger.holding(torch.empty_like(full)) as received:
            yield Handle(self.traffic, [dist.all_to_all_single(received, full, group=self.group)])
            return self._sum(self._chunks(received), dtype)

    def receive_bytes(self, full_bytes: int) -> int:
        return full_bytes


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
