"""Exchanges of tensors with other ranks inside of a forward; each has an exchange of its gradient in backward."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from terrazzo.engine.comm.backends import collectives_for
from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.comm.failed_exchanges import MeshGroups
from terrazzo.engine.comm.transfer import Moves, Transfer
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.engine.labels.label import Label
from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.labels.rank_places import NOT_THE_SAME
from terrazzo.engine.runtime.device import HOST, current, kind_of_group
from terrazzo.errors import RanksApart

__all__ = ["AxisRanks", "Move", "exchange"]

T = TypeVar("T")
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

    All that they exchange goes through the engine's collectives, which count it. Each exchange is labelled: ranks that
    are at different ones raise instead of adding up what does not belong together. The ranks of a model make views of
    themselves with the labels of its modules (`labelled`), which have one count of exchanges.

    Args:
        along: the collectives along the axis of these ranks, whose connections models share; None: this one is alone.

    Attributes:
        traffic: what this rank has sent them of one model: `all_gather`, `all_to_all`, `send` to the next rank, and
            `control`.
    """

    def __init__(self, along: Collectives | None) -> None:
        self.traffic = Traffic()
        self._along = None if along is None else along.counted_by(self.traffic)
        self.size, self.rank = (1, 0) if along is None else (along.size, along.rank)
        self._label: Label | None = None
        self._count = itertools.count(1)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> Self:
        """The ranks of a process group, with connections of their own. Collective."""
        shared = MeshGroups(shared=True)
        return cls(collectives_for(group, current(kind_of_group()), Traffic(), Ledger(), mesh_groups=shared))

    def labelled(self, label: Label) -> Self:
        """The same ranks, whose exchanges have this label, and their number in it."""
        view = copy.copy(self)
        view._label = label
        return view

    @property
    def back(self) -> Self:
        """The same ranks, as they exchange the gradients of what these do."""
        assert self._label is not None, "exchanges of modules have labels"
        return self.labelled(replace(self._label, purpose=Purpose.ACTIVATIONS_BACK))

    def compare(self, before: Label) -> None:
        """Compare what was exchanged, where messages do not carry labels: with NCCL. Collective there.

        Args:
            before: where the ranks meet, for errors.

        Raises:
            RanksApart: on every rank, where it differs: what they computed since is wrong.
        """
        along = self._along
        if along is None or along.says_labels:
            return
        largest, smallest = along.maximum(torch.tensor([along.checksum, ~along.checksum], device=HOST)).tolist()
        if largest == ~smallest:
            return
        own, label = [*along.trail], replace(self._label or Label(), purpose=Purpose.ACTIVATIONS)
        trails = along.gather_rows(torch.tensor(own, device=HOST)).tolist()
        for rank, theirs in zip(along.links.ranks, trails, strict=True):
            label.check_trail(own, theirs, rank)
        raise RanksApart(f"{NOT_THE_SAME} modules some time before {before}. {label.edit}")

    def _exchanged(self, moves: Moves[T]) -> Transfer[T]:
        """Start an exchange, with the label of this view and the next number."""
        assert self._label is not None, "exchanges of modules have labels"
        return Transfer(moves, replace(self._label, number=next(self._count)))

    def all_gather(self, own: Tensor) -> Tensor:
        """Every rank's `own`, `[ranks, ...]`."""
        full = own.new_empty((self.size, *own.shape))
        full[self.rank] = own
        self._exchanged(self._collectives.all_gather(full.view(-1))).finish()
        return full

    def agree_on(self, number: int) -> bool:
        """Whether all ranks have the same number, of 63 bits. Collective; the host waits for the other hosts."""
        largest, smallest = self._collectives.maximum(torch.tensor([number, ~number], device=HOST)).tolist()
        return largest == ~smallest  # type: ignore[no-any-return]

    def told(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, of 63 bits, in the order of ranks. Collective; the host waits for the others."""
        rows: list[list[int]] = self._collectives.gather_rows(torch.tensor([*numbers], device=HOST)).tolist()
        return rows

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
        return self._exchanged(self._collectives.all_to_all(sent.view(-1), going, received.view(-1), coming, kind))

    @property
    def _collectives(self) -> Collectives:
        assert self._along is not None, "a rank that is alone exchanges nothing"
        return self._along
