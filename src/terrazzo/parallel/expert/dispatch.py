"""Expert parallelism: the ranks along `ep` have other experts of the same layers, and send each other tokens.

A module of experts has its matrices stacked, `[experts, ...]`, and is given rows that are sorted by expert. `dispatch`
brings each row to the rank that has its expert, and `combine` brings what comes of it back; gradients take the same
ways backwards. Nothing is dropped, and nothing is added up here: rows only move.

Ranks come to these exchanges in one order, though their data may differ: whoever has no rows gives none. Each exchange
begins with a meeting, at which every rank says where it is, and how many rows it has for each expert. Ranks that are at
different places raise there; so do those of which one has come to the end of its forward or backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from terrazzo.engine.comm.label import Label, Purpose
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.runtime.device import HOST
from terrazzo.errors import RanksApart
from terrazzo.parallel.exchanges import GroupRanks, exchange
from terrazzo.parallel.expert.row_order import RowOrder

__all__ = ["ExpertRanks", "Experts", "RowRoute"]


@dataclass(frozen=True)
class RowRoute:
    """How rows have come to this rank, for their way back.

    Attributes:
        counts: rows that have arrived for each of this rank's experts.
        going, coming: rows to, and from, each rank.
        order: of the rows that have arrived, on their device.
    """

    counts: Tensor
    going: list[int]
    coming: list[int]
    order: RowOrder


class ExpertRanks(GroupRanks):
    """The ranks along `ep`, and this one's place among them. Each has a run of the experts of every module, as many.

    Args:
        axes: of a mesh of `tz.mesh(ep=...)`.
        counts: of experts, by the names of the modules; of a model in stages those of this rank's, maybe none.

    Attributes:
        traffic: what this rank has sent them: `all_to_all`, and `control`.
    """

    def __init__(self, axes: Axes, counts: Mapping[str, int]) -> None:
        self._along = axes.along("ep")
        super().__init__(None, self._along)
        self.axes = axes
        self.traffic.reset()
        self._modules, self._units, self._width = tuple(counts), tuple[str, ...](), max(counts.values(), default=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied model belongs to the same group."""
        return self

    def join(self, units: tuple[str, ...]) -> None:
        """Be told the names of the units before whose weights the ranks meet."""
        self._units = units

    def meet_before(self, label: Label) -> None:
        """Meet where nothing is exchanged: before weights are waited for, and at the end of a pass. Collective.

        Raises:
            RanksApart: on every rank, where others are elsewhere.
        """
        self._meet(label, None)

    def counts_at(self, module: int, own: Tensor) -> Tensor:
        """Every rank's rows for each expert, int64 `[ranks, experts]` in the host's memory. Collective.

        Raises:
            RanksApart: on every rank, where others are elsewhere.
        """
        return self._meet(self._label(Purpose.EXPERTS, module), own)[:, : own.numel()]

    def return_through(self, module: int) -> None:
        """Meet before gradients go back. Collective.

        Raises:
            RanksApart: on every rank, where others are elsewhere.
        """
        self._meet(self._label(Purpose.EXPERTS_BACK, module), None)

    def _label(self, purpose: Purpose, module: int) -> Label:
        return Label(purpose, len(self._units) + module)

    def _meet(self, label: Label, counts: Tensor | None) -> Tensor:
        numbers = torch.zeros(1 + self._width, dtype=torch.int64, device=HOST)
        numbers[0] = label.code
        if counts is not None:
            numbers[1 : 1 + counts.numel()] = counts
        rows = self._along.gather_rows(numbers)
        here = replace(label, names=(*self._units, *self._modules))
        for rank, code in enumerate(rows[:, 0].tolist()):
            if code != label.code:
                raise RanksApart(
                    f"The ranks that share experts have not run the same: here it is the turn of {here}, and on rank "
                    f"{rank} along ep of {here.of_code(code)}. Each of them must call every module of experts, and the "
                    "blocks around it, as often as the others and in the same order: where a rank has no tokens for "
                    "it, call it with no rows, a tensor of shape [0, channels]; and the loss must depend on what it "
                    "returns."
                )
        return rows[:, 1:]


class Experts:
    """How one module's rows come to its experts and back.

    Args:
        ranks: that share the experts.
        module: its number among the modules of experts.
        count: of all its experts.
    """

    def __init__(self, ranks: ExpertRanks, module: int, count: int) -> None:
        self.ranks, self.count, self._module = ranks, count, module
        # No part of compiled graphs, whose compiler would run it to see what it does.
        self.dispatch = torch.compiler.disable(self._dispatch)
        self.combine = torch.compiler.disable(self._combine)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def local(self) -> slice:
        """Which of the experts this rank has."""
        own = self.count // self.ranks.size
        return slice(self.ranks.rank * own, (self.ranks.rank + 1) * own)

    def _dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, RowRoute]:
        """Bring rows to the ranks that have their experts. Collective; the host waits for the device.

        Args:
            rows: `[rows, channels]`, sorted by expert.
            counts: int64 `[experts]`, how many are for each.

        Returns:
            The rows for this rank's experts, `[arrived, channels]`: sorted by expert, within one by the rank that they
            are from, and within that as they were there. And their way back.
        """
        ranks, own = self.ranks, self.count // self.ranks.size
        table = ranks.counts_at(self._module, counts.cpu())
        going = table[ranks.rank].view(ranks.size, own).sum(dim=1).tolist()
        here = table[:, self.local]
        coming = here.sum(dim=1).tolist()
        expert = torch.arange(own).repeat(ranks.size).repeat_interleave(here.flatten())
        route = RowRoute(here.sum(dim=0), going, coming, RowOrder.by(expert).to(rows.device))
        arrived = exchange(rows, lambda x: ranks.deal(x, going, coming), lambda grad: ranks.deal(grad, coming, going))
        return route.order.sort(arrived), route

    def _combine(self, outputs: Tensor, route: RowRoute) -> Tensor:
        """Bring what has come of arrived rows back to where they are from. Collective.

        Args:
            outputs: `[arrived, channels]`, in the order of `dispatch`.

        Returns:
            `[rows, channels]`, in the order that `dispatch` was given.
        """
        ranks, module, going, coming = self.ranks, self._module, route.going, route.coming

        def back(grad: Tensor) -> Tensor:
            ranks.return_through(module)
            return ranks.deal(grad, going, coming)

        return exchange(route.order.restore(outputs), lambda x: ranks.deal(x, coming, going), back)
