"""How busy experts are: what one training step has given each, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine import inside_backward
from terrazzo.engine.plan.axes import Axes
from terrazzo.engine.plan.marks import Mark
from terrazzo.parallel import stacked_experts

__all__ = ["Load", "RowsCounter", "count_rows", "counters_of", "load_of"]


@dataclass(frozen=True)
class Load:
    """How busy the experts of one router have been, over all ranks.

    Attributes:
        counts: rows that each has computed; none is ever dropped.
        imbalance: those of the busiest, as a multiple of the mean; 1 where all are alike.
        entropy: mean of the entropy of tokens' scores, in nats; None where the router does not tell.
    """

    counts: tuple[int, ...]
    imbalance: float
    entropy: float | None


def load_of(counts: Tensor, entropy: float | None) -> Load:
    """That of rows `[experts]`."""
    mean = counts.double().mean()
    return Load(tuple(counts.tolist()), float(counts.max() / mean) if mean else 1.0, entropy)


class RowsCounter:
    """A hook before the forward of experts of transformers: counts rows of each in training, recomputed ones once."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._rows: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled() and not inside_backward():
            chosen = [*args, *kwargs.values()][1].flatten()
            rows = torch.zeros(self._experts + 1, dtype=torch.int64, device=chosen.device)
            rows.scatter_add_(0, chosen.clamp(max=self._experts), torch.ones_like(chosen))
            self._rows = rows if self._rows is None else self._rows + rows

    def forget(self) -> None:
        """Count anew."""
        self._rows = None

    def take(self, axes: Axes) -> Tensor:
        """Rows since the last call, int64 `[experts]`, over all ranks. Collective."""
        own = (
            torch.zeros(self._experts + 1, dtype=torch.int64, device=axes.device) if self._rows is None else self._rows
        )
        self._rows = None
        return axes.total(own, axes.with_stages)[:-1]


_COUNTERS = Mark[RowsCounter]("terrazzo_rows_counter")


def count_rows(model: nn.Module) -> None:
    """Have what experts of transformers compute be counted, before ranks share them."""
    for module in model.modules():
        if stacked_experts(module) is not None:
            counter = _COUNTERS.leave(module, RowsCounter(int(module.num_experts)))  # type: ignore[arg-type]
            module.register_forward_pre_hook(counter, with_kwargs=True)


def counters_of(model: nn.Module) -> Iterator[tuple[str, RowsCounter]]:
    """By name of the experts."""
    for name, module in model.named_modules():
        if (counter := _COUNTERS.find(module)) is not None:
            yield name, counter
