"""Expert parallelism: each rank along `ep` has some of a layer's experts, and rows of tokens go to them and back.

A module of experts has its matrices stacked, `[experts, ...]`, and is given rows that are sorted by expert. `dispatch`
sends each row to the rank that has its expert, and `combine` sends the expert's output back. Gradients take the same
routes in reverse. Rows only move: none is dropped, and none are added up.

All ranks call these exchanges in the same order, though their data may differ: a rank without rows sends none. Before
each exchange the ranks compare where they are, and tell each other how many rows they have for each expert. Ranks that
are at different places raise there, and so does one that waits where another has ended its forward or backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from terrazzo.engine.labels.label import Label, labelled
from terrazzo.engine.labels.numbered import Names
from terrazzo.engine.labels.purposes import RUN_ALL_EXPERTS, Purpose
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.runtime.private_torch import uncompiled_once_called
from terrazzo.errors import RanksApart
from terrazzo.parallel.exchanges import AxisRanks, exchange
from terrazzo.parallel.expert.row_order import RowOrder

__all__ = ["ExpertRanks", "Experts", "RowRoute"]


@dataclass(frozen=True)
class RowRoute:
    """How rows came to this rank, by which `combine` sends outputs back.

    Attributes:
        counts: how many rows have arrived for each of this rank's experts, int64.
        send_counts, receive_counts: how many rows this rank has sent to each rank, and received from each.
        order: how the arrived rows were sorted, on their device.
    """

    counts: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    order: RowOrder


class ExpertRanks(AxisRanks):
    """The ranks along `ep`, and this one's place among them. All have the same number of experts of each module.

    Args:
        axes: of a mesh of `tz.mesh(ep=...)`.
        counts: the number of experts of each module, by name; of a model in stages those that this rank runs.

    Attributes:
        modules: names of the modules of experts.
        traffic: what this rank has sent them: `all_to_all`, and `control`.
    """

    def __init__(self, axes: Axes, counts: Mapping[str, int]) -> None:
        super().__init__(axes.along("ep"))
        self.axes = axes
        self.modules, self._units = tuple(counts), tuple[str, ...]()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied model belongs to the same group."""
        return self

    def join(self, units: tuple[str, ...]) -> None:
        """Take the names of the units at whose weights the ranks meet, for errors."""
        self._units = units

    def meet_before(self, label: Label) -> None:
        """Compare places where no rows move: before a wait for weights, and at the end of a pass. Collective.

        Raises:
            RanksApart: on every rank, where they are at different places.
        """
        with self._told_of_experts(label):
            self._collectives.maximum(torch.empty(0, device=HOST))

    def counts_at(self, module: int, own: Tensor) -> Tensor:
        """Every rank's rows for each expert, int64 `[ranks, experts]` in the host's memory. Collective.

        Raises:
            RanksApart: on every rank, where they are at different places.
        """
        with self._told_of_experts(self._label_of(Purpose.EXPERTS, module)):
            return self._collectives.gather_rows(own.to(torch.int32)).long()

    def return_through(self, module: int) -> None:
        """Compare places before gradients go back. Collective.

        Raises:
            RanksApart: on every rank, where they are at different places.
        """
        self.meet_before(self._label_of(Purpose.EXPERTS_BACK, module))

    def _label_of(self, purpose: Purpose, module: int) -> Label:
        return Label(purpose, module, names=Names(self._units, experts=self.modules))

    @contextlib.contextmanager
    def _told_of_experts(self, label: Label) -> Iterator[None]:
        """Ranks meet inside, at that label; where they are apart, errors say how experts are called."""
        try:
            with labelled(label):
                yield
        except RanksApart as apart:
            raise RanksApart(f"{apart}{'' if RUN_ALL_EXPERTS in str(apart) else f' {RUN_ALL_EXPERTS}'}") from None


class Experts:
    """Sends one module's rows to its experts and their outputs back.

    Args:
        ranks: that share the experts.
        module: the module's number among the modules of experts.
        count: how many experts it has on all ranks.
    """

    def __init__(self, ranks: ExpertRanks, module: int, count: int) -> None:
        self.ranks, self.count, self._module = ranks, count, module
        names = Names(experts=ranks.modules)
        self._there, self._back = (
            ranks.labelled(Label(each, module, names=names)) for each in (Purpose.EXPERTS, Purpose.EXPERTS_BACK)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def local(self) -> slice:
        """The experts that this rank has."""
        own = self.count // self.ranks.size
        return slice(self.ranks.rank * own, (self.ranks.rank + 1) * own)

    @uncompiled_once_called  # a compiler would run it to see what it does
    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, RowRoute]:
        """Send rows to the ranks that have their experts. Collective; the host waits for the device.

        Args:
            rows: `[rows, channels]`, sorted by expert.
            counts: how many rows each expert gets, int64 `[experts]`.

        Returns:
            The rows for this rank's experts, `[arrived, channels]`, and their route. Rows are sorted by expert, for
            one expert by the rank that sent them, and of one rank in its order.
        """
        ranks, own = self.ranks, self.count // self.ranks.size
        table = ranks.counts_at(self._module, counts.cpu())
        send_counts = table[ranks.rank].view(ranks.size, own).sum(dim=1).tolist()
        arriving = table[:, self.local]
        receive_counts = arriving.sum(dim=1).tolist()
        expert = torch.arange(own).repeat(ranks.size).repeat_interleave(arriving.flatten())
        route = RowRoute(arriving.sum(dim=0), send_counts, receive_counts, RowOrder.by(expert).to(rows.device))
        there, back = self._there, self._back
        arrived = exchange(
            rows,
            lambda x: there.all_to_all_v(x, send_counts, receive_counts),
            lambda grad: back.all_to_all_v(grad, receive_counts, send_counts),
        )
        return route.order.sort(arrived), route

    @uncompiled_once_called
    def combine(self, outputs: Tensor, route: RowRoute) -> Tensor:
        """Send the outputs for arrived rows back to the ranks that sent the rows. Collective.

        Args:
            outputs: `[arrived, channels]`, in the order of the rows that `dispatch` returned.

        Returns:
            `[rows, channels]`, in the order of the rows that `dispatch` was given.
        """
        ranks, module, send_counts, receive_counts = self.ranks, self._module, route.send_counts, route.receive_counts

        def backward(grad: Tensor) -> Tensor:
            ranks.return_through(module)
            return self._back.all_to_all_v(grad, send_counts, receive_counts)

        there = self._there
        return exchange(
            route.order.restore(outputs), lambda x: there.all_to_all_v(x, receive_counts, send_counts), backward
        )
