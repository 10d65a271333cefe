"""What modules exchange with other ranks: plain tensors, every byte counted, with another exchange on the way back."""

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
from terrazzo.engine.comm.traffic import Ledger, Traffic
from terrazzo.engine.comm.transfer import Handle, Transfer

__all__ = ["GroupRanks", "Move", "exchange"]

Move = Callable[[Tensor], Tensor]


def exchange(values: Tensor, there: Move, back: Move) -> Tensor:
    """`there(values)`; its gradient goes through `back`.

    The gradient has none itself: what `back` exchanges is not on autograd's tape. A second derivative raises torch's
    `RuntimeError`.
    """
    exchanged: Tensor = _Exchange.apply(values, there, back)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None


class GroupRanks:
    """The ranks that share sequences, or experts, and this one's place among them.

    Attributes:
        traffic: what this rank has sent them: `all_gather`, `all_to_all`, and `send` to the next rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.size, self.rank = group, group.size(), group.rank()
        self.traffic = Traffic()
        self._collectives: Collectives | None = None

    def gathered(self, own: Tensor) -> Tensor:
        """Every rank's `own`, `[ranks, ...]`."""
        full = own.new_empty((self.size, *own.shape))
        full[self.rank] = own
        if self._collectives is None:
            self._collectives = self._joined(own.device)
        Transfer(self._collectives.all_gather(full.view(-1))).finish()
        return full

    def equal(self, number: int, device: torch.device) -> bool:
        """Whether all ranks have the same; the host waits for `device`, and nothing is counted."""
        own = torch.tensor([number], device=device)
        all_of_them = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(all_of_them, own, group=self._group)
        return len({int(each) for each in all_of_them}) == 1

    def swap(self, parts: Tensor) -> Tensor:
        """`parts` `[ranks, ...]` has one for each rank; the result has one of each rank."""
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        self.traffic.record("all_to_all", parts.nbytes // self.size * (self.size - 1))
        self._all_to_all("all_to_all", received, parts.contiguous()).wait()
        return received

    def summed(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum of what each rank has for this one in `parts` `[ranks, ...]`.

        Sent in `dtype`, and added in rank order in the dtype of `parts`: the same bits on every backend.
        """
        received = self.swap(parts.to(dtype))
        return functools.reduce(torch.add, received.to(parts.dtype).unbind())

    def deal(self, rows: Tensor, going: Sequence[int], coming: Sequence[int]) -> Tensor:
        """Give each rank some of `rows` `[rows, ...]`, and be given others; the host waits.

        Args:
            going: how many to each rank, in their order.
            coming: how many from each: as many rows of the result, in the order of ranks.
        """
        width = rows.shape[1:].numel()
        received = rows.new_empty((sum(coming), *rows.shape[1:]))
        self.traffic.record("all_to_all", (sum(going) - going[self.rank]) * width * rows.itemsize)
        numels = ([each * width for each in coming], [each * width for each in going])
        self._all_to_all("all_to_all", received, rows.contiguous(), *numels).wait()
        return received

    def pass_on(self, own: Tensor) -> Callable[[], Tensor]:
        """Send `own` to the next rank; the result waits for the last one's, of the same shape.

        An exchange of all with all in which others get nothing: all backends have it, and it cannot wait in a circle.
        """
        sent, received = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
        going, coming = [0] * self.size, [0] * self.size
        going[(self.rank + 1) % self.size] = coming[(self.rank - 1) % self.size] = own.numel()
        self.traffic.record("send", own.nbytes)
        handle = self._all_to_all("send", received, sent, coming, going)

        def arrived() -> Tensor:
            handle.wait()
            return received

        return arrived

    # -- the backend -------------------------------------------------------------------------------------------

    def _joined(self, device: torch.device) -> Collectives:
        """The engine's own: gloo's all-gather goes through a copy, which it keeps for a while."""
        return collectives_for(self._group, device, self.traffic, Ledger())

    def _all_to_all(
        self, kind: str, received: Tensor, sent: Tensor, coming: list[int] | None = None, going: list[int] | None = None
    ) -> Handle:
        """Of flat `sent` so many elements to each rank, by default as many; likewise of `received`.

        Waits are counted as those of `kind`.
        """
        flat = received.view(-1), sent.view(-1)
        work = dist.all_to_all_single(*flat, coming, going, group=self._group, async_op=True)
        return Handle([work], (received, sent), self.traffic.times_of("", kind))
