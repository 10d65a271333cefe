"""Exchanges of tensors with other ranks inside of a forward; each has an exchange of its gradient in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from terrazzo.engine.comm.backends import collectives_for
from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.engine.runtime.device import HOST

__all__ = ["AxisRanks", "Move", "exchange"]

Move = Callable[[Tensor], Tensor]


def exchange(values: Tensor, forward: Move, backward: Move) -> Tensor:
    """`forward(values)`, whose gradient is `backward` of the output's gradient.

    A second derivative raises torch's `RuntimeError`: what `backward` exchanges is not on autograd's tape.
    """
    exchanged: Tensor = _Exchange.apply(values, forward, backward)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, forward: Move, backward: Move) -> Tensor:
        ctx.of_gradient = backward
        return forward(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.of_gradient(grad), None, None


class AxisRanks:
    """The ranks along one axis, which share sequences, experts or matrices, and this one's place among them.

    All that they exchange goes through the engine's collectives, which count it.

    Args:
        along: the collectives along the axis of these ranks; or their process group, of which collectives are made at
            the first exchange; None: this one is alone.

    Attributes:
        traffic: what this rank has sent them: `all_gather`, `all_to_all`, `send` to the next rank, and `control`.
    """

    def __init__(self, along: Collectives | dist.ProcessGroup | None) -> None:
        self._along = along
        self.traffic = along.traffic if isinstance(along, Collectives) else Traffic()
        if along is None:
            self.size, self.rank = 1, 0
        elif isinstance(along, Collectives):
            self.size, self.rank = along.size, along.rank
        else:
            self.size, self.rank = along.size(), along.rank()

    def all_gather(self, own: Tensor) -> Tensor:
        """Every rank's `own`, `[ranks, ...]`."""
        full = own.new_empty((self.size, *own.shape))
        full[self.rank] = own
        Transfer(self._collectives(own.device).all_gather(full.view(-1))).finish()
        return full

    def agree_on(self, number: int, device: torch.device = HOST) -> bool:
        """Whether all ranks have the same number, of 63 bits. Collective; the host waits for the other hosts.

        Args:
            device: the one whose memory later exchanges are of, for ranks of a group that have exchanged nothing yet.
        """
        rows = self._collectives(device).gather_rows(torch.tensor([number], device=HOST))
        return len(set(rows.flatten().tolist())) == 1

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send part r of `parts`, `[ranks, ...]`, to rank r. The result has the part that each rank sent here."""
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        numels = [parts[0].numel()] * self.size
        self._all_to_all(received, numels, parts.contiguous(), numels).finish()
        return received

    def reduce_scatter(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of the ranks' part r of `parts`, `[ranks, ...]`, on rank r.

        Parts are sent in `dtype` and added in rank order in the dtype of `parts`: the same bits on every backend.
        """
        received = self.all_to_all(parts.to(dtype))
        return functools.reduce(torch.add, received.to(parts.dtype).unbind())

    def all_to_all_v(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send each rank some of `rows`, `[rows, ...]`, and receive others'. The host waits.

        Args:
            send_counts: how many go to each rank, in the order of ranks.
            receive_counts: how many come from each rank, in the order of ranks, as in the result.
        """
        width = rows.shape[1:].numel()
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        numels = [each * width for each in receive_counts], [each * width for each in send_counts]
        self._all_to_all(received, numels[0], rows.contiguous(), numels[1]).finish()
        return received

    def send_to_next(self, own: Tensor) -> Callable[[], Tensor]:
        """Start sending `own` to the next rank. The result waits for the previous rank's, of the same shape.

        It is an all-to-all in which other ranks get nothing: all backends have that, and it cannot deadlock.
        """
        sent, received = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
        going, coming = [0] * self.size, [0] * self.size
        going[(self.rank + 1) % self.size] = coming[(self.rank - 1) % self.size] = own.numel()
        transfer = self._all_to_all(received, coming, sent, going, "send")

        def arrived() -> Tensor:
            transfer.finish()
            return received

        return arrived

    def _all_to_all(
        self, received: Tensor, coming: Sequence[int], sent: Tensor, going: Sequence[int], kind: str = "all_to_all"
    ) -> Transfer[Tensor]:
        """Start to fill `received` with so many elements of each rank, from each one's contiguous `sent`."""
        collectives = self._collectives(sent.device)
        return Transfer(collectives.all_to_all(sent.view(-1), going, received.view(-1), coming, kind))

    def _collectives(self, device: torch.device) -> Collectives:
        """The collectives that reach the memory of `device`. Collective the first time."""
        if not isinstance(self._along, Collectives):
            assert self._along is not None, "a rank that is alone exchanges nothing"
            self._along = collectives_for(self._along, device, self.traffic, Ledger())
        return self._along
