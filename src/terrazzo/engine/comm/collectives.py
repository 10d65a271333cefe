"""Collectives and messages along a mesh axis, with the bytes of what they move counted.

All sums run in rank order along an axis, ((r0 + r1) + r2) + ..., on every backend but NCCL, which is what makes results
reproducible bit by bit (see docs/numerics.md).
"""

from __future__ import annotations

import copy
import functools
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.comm.control_exchanges import ControlExchanges, all_gather_single, carried
from terrazzo.engine.comm.links import Links
from terrazzo.engine.comm.sums import divide
from terrazzo.engine.comm.transfer import Handle, Moves, converted, next_stream, outlives_chain
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic

__all__ = ["Collectives", "MessageRoute", "NativeCollectives"]

_TRAIL = 16
"""How many of the last exchanges a rank remembers."""


class MessageRoute(NamedTuple):
    """The way of messages of one kind from one rank of an axis to another; of flags, "control"."""

    kind: str
    source: int
    to: int

    @property
    def counts_as(self) -> str:
        """The kind of traffic that its messages count as: flags are none that is promised."""
        return "control" if self.kind == "control" else "send"


class _Line(NamedTuple):
    """What carries a message: a process group, and a tag there; `queued`: a stream waits for it, and not the host."""

    group: dist.ProcessGroup
    tag: int
    queued: bool


class Collectives(ControlExchanges, ABC):
    """Collectives along one mesh axis. Tensors are 1-D, contiguous, and divide evenly over the axis's ranks.

    Beside them, messages from one rank to another, and the exchanges of a few numbers of `ControlExchanges`.

    Attributes:
        says_labels: whether messages carry the label of what they move; else ranks compare checksums of these.
        trail: codes of the labels of the last exchanges, where messages carry none; -1 where there has been none.
        checksum: of the codes of all of them.
        all_reduce_steps: collectives in a row that an all-reduce is made of.
    """

    says_labels = True
    all_reduce_steps = 2

    def __init__(self, links: Links, traffic: Traffic, ledger: Ledger) -> None:
        super().__init__(links, traffic, ledger)
        self.trail, self.checksum = _new_trail(), 0

    def counted_by(self, traffic: Traffic) -> Self:
        """The same connections for one more model, with what goes through them from here counted by `traffic`."""
        other = copy.copy(self)
        other.traffic, other.trail, other.checksum = traffic, _new_trail(), 0
        other.model = self.links.next_model()
        return other

    def all_gather(self, full: Tensor, kind: str = "all_gather") -> Moves[Tensor]:
        """Fill `full` from every rank's own chunk of it, in place.

        Args:
            kind: of traffic that it counts as.
        """
        self.traffic.record(kind, self._share_bytes(full), axis=self.axis)
        yield from self._all_gather(full, kind)
        return full

    def reduce_scatter(self, full: Tensor, dtype: torch.dtype) -> Moves[Tensor]:
        """This rank's chunk of the sum of every rank's `full`, as a new tensor of `dtype`."""
        self.traffic.record("reduce_scatter", self._share_bytes(full), axis=self.axis)
        return (yield from self._reduce_scatter(full, dtype, "reduce_scatter"))

    def all_reduce(self, full: Tensor, dtype: torch.dtype, denominator: float) -> Moves[Tensor]:
        """The sum of every rank's `full` divided by `denominator`, in `dtype`; may reuse `full`'s memory."""
        self.traffic.record("all_reduce", 2 * self._share_bytes(full), axis=self.axis)
        return (yield from self._all_reduce(full, dtype, denominator))

    def all_to_all(
        self,
        sent: Tensor,
        sent_numels: Sequence[int],
        received: Tensor,
        received_numels: Sequence[int],
        kind: str = "all_to_all",
    ) -> Moves[Tensor]:
        """Fill `received` with what every rank of the axis has for this one, in rank order, from each one's `sent`.

        Args:
            sent_numels: elements for each rank. What a rank has for itself is copied, and counts as no traffic.
            received_numels: elements from each.
            kind: of traffic that it counts as.
        """
        sent_bytes = (sum(sent_numels) - sent_numels[self.rank]) * sent.itemsize
        self.traffic.record(kind, sent_bytes, axis=self.axis)
        yield from self._all_to_all(sent, sent_numels, received, received_numels, kind)
        return received

    def open_routes(self, routes: Sequence[MessageRoute], device: torch.device) -> None:
        """Make ready for messages of a device's memory on these routes, and on no others. Collective."""

    def send(self, values: Tensor, route: MessageRoute, tag: int) -> Handle:
        """Start sending contiguous `values` to a rank of the axis; they must stay as they are until that has ended.

        Args:
            route: from this rank to that one. What is sent on one is asked for in the same order.
            tag: what the rank asks for it by; no two messages under way between two ranks have the same.
        """
        self.traffic.record(route.counts_as, values.nbytes, axis=self.axis)
        line = self._line_for(values, route, tag)
        work = dist.isend(carried(values), group=line.group, group_dst=route.to, tag=line.tag)
        return Handle([work], (values,), self.traffic.times_of(self.axis, route.counts_as), line.queued)

    def receive(self, into: Tensor, route: MessageRoute, tag: int) -> Handle:
        """Start receiving contiguous `into` on a route to this rank."""
        line = self._line_for(into, route, tag)
        work = dist.irecv(carried(into), group=line.group, group_src=route.source, tag=line.tag)
        return Handle([work], (into,), self.traffic.times_of(self.axis, route.counts_as), line.queued)

    def _line_for(self, values: Tensor, route: MessageRoute, tag: int) -> _Line:
        """What carries a message of these values on a route."""
        return _Line(self._group_for(values), tag, queued=False)

    @abstractmethod
    def _all_gather(self, full: Tensor, kind: str) -> Moves[Tensor]:
        """Do what `all_gather` says; waits are counted as those of `kind`."""

    @abstractmethod
    def _reduce_scatter(self, full: Tensor, dtype: torch.dtype, kind: str) -> Moves[Tensor]:
        """Do what `reduce_scatter` says; waits are counted as those of `kind`."""

    @abstractmethod
    def _all_to_all(
        self, sent: Tensor, sent_numels: Sequence[int], received: Tensor, received_numels: Sequence[int], kind: str
    ) -> Moves[None]:
        """Do what `all_to_all` says; waits are counted as those of `kind`."""

    @abstractmethod
    def receive_bytes(self, full_bytes: int) -> int:
        """Memory that summing a tensor of `full_bytes` needs besides it and its result."""

    def _all_reduce(self, full: Tensor, dtype: torch.dtype, denominator: float) -> Moves[Tensor]:
        own = yield from self._reduce_scatter(full, dtype, "all_reduce")
        # What fp16 sends back keeps the loss scale, without which small gradients would be zero.
        scaled = full.dtype == torch.float16
        self._chunks(full)[self.rank].copy_(divide(own, self.size if scaled else denominator))
        yield from self._all_gather(full, "all_reduce")
        return divide(full.to(dtype), denominator / self.size) if scaled else full.to(dtype)

    def _chunks(self, full: Tensor) -> list[Tensor]:
        return list(full.view(self.size, -1).unbind())

    def _share_bytes(self, full: Tensor) -> int:
        return full.nbytes // self.size * (self.size - 1)


class NativeCollectives(Collectives):
    """The backend's own collectives: NCCL, and the `fake` backend of simulations."""

    all_reduce_steps = 1
    says_labels = False

    def __init__(self, links: Links, traffic: Traffic, ledger: Ledger) -> None:
        super().__init__(links, traffic, ledger)
        self._routes: dict[tuple[str, bool], dist.ProcessGroup] = {}  # of messages, which have no tags

    def open_routes(self, routes: Sequence[MessageRoute], device: torch.device) -> None:
        """NCCL knows no tags: of two ranks, each runs what it sends and receives in its own order, and waits for the
        other. So each route has a communicator to itself. They connect one after the other, while nobody needs them.
        """
        for route in routes:
            upward = route.kind, route.to > route.source
            if upward not in self._routes:
                self._routes[upward] = dist.new_group(self.links.ranks, backend="nccl", use_local_synchronization=True)
        for route in routes:
            if self.rank in (route.source, route.to):
                act = self.send if self.rank == route.source else self.receive
                act(torch.zeros(1, device=device), route, 0).wait()

    def _line_for(self, values: Tensor, route: MessageRoute, tag: int) -> _Line:
        if not values.is_cuda:
            return super()._line_for(values, route, tag)
        return _Line(self._routes[route.kind, route.to > route.source], 0, queued=True)

    def _all_gather(self, full: Tensor, kind: str) -> Moves[Tensor]:
        self._leave_trail()
        whole = carried(full)
        own = whole.view(self.size, -1)[self.rank]
        yield self._queued(kind, all_gather_single(whole, own, group=self.group, async_op=True), full)
        return full

    def _reduce_scatter(self, full: Tensor, dtype: torch.dtype, kind: str) -> Moves[Tensor]:
        self._leave_trail()
        make = functools.partial(full.new_empty, full.numel() // self.size)
        own = outlives_chain(make) if full.dtype == dtype else make()
        yield self._queued(kind, _reduce_scatter_single(own, full, group=self.group, async_op=True), full, own)
        return converted(own, dtype)

    def _all_to_all(
        self, sent: Tensor, sent_numels: Sequence[int], received: Tensor, received_numels: Sequence[int], kind: str
    ) -> Moves[None]:
        self._leave_trail()
        sizes = list(received_numels), list(sent_numels)
        work = dist.all_to_all_single(received, sent, *sizes, group=self.group, async_op=True)
        yield self._queued(kind, work, sent, received)

    def _queued(self, kind: str, work: Any, *tensors: Tensor) -> Handle:
        return Handle([work], tensors, self.traffic.times_of(self.axis, kind), queued=True)

    def _leave_trail(self) -> None:
        code = self.label.code
        self.trail.append(code)
        self.checksum = zlib.crc32(code.to_bytes(8, "little"), self.checksum)

    def receive_bytes(self, full_bytes: int) -> int:
        return 0

    def _all_reduce(self, full: Tensor, dtype: torch.dtype, denominator: float) -> Moves[Tensor]:
        self._leave_trail()
        yield self._queued("all_reduce", dist.all_reduce(full, group=self.group, async_op=True), full)
        next_stream()
        return divide(converted(full, dtype), denominator)


def _new_trail() -> deque[int]:
    """Codes of the last exchanges; -1 where there has been none."""
    return deque([-1] * _TRAIL, _TRAIL)


# torch 2.13 renamed it; the old name warns there and is the only one before.
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
