"""How busy experts are: how many rows each got in a training step, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine import inside_backward
from terrazzo.engine.mesh.axes import Axes
from terrazzo.marks import Mark
from terrazzo.parallel import stacked_experts

__all__ = ["ExpertLoad", "RowsCounter", "count_rows", "counters_of", "load_of"]


@dataclass(frozen=True)
class ExpertLoad:
    """How busy the experts of one router have been, over all ranks.

    Attributes:
        counts: rows that each expert has computed; none is ever dropped.
        imbalance: rows of the busiest expert as a multiple of the mean; 1 if all are equally busy.
        entropy: mean entropy of tokens' scores, in nats; None if the router's scores are not known.
    """

    counts: tuple[int, ...]
    imbalance: float
    entropy: float | None


def load_of(counts: Tensor, entropy: float | None) -> ExpertLoad:
    """The load of a router whose experts got `counts` rows, `[experts]`."""
    mean = counts.double().mean()
    return ExpertLoad(tuple(counts.tolist()), float(counts.max() / mean) if mean else 1.0, entropy)


class RowsCounter:
    """A forward pre-hook on experts of transformers: counts each expert's rows in training, without recomputation."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._rows: Tensor | None = None
        self._scores: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _counts(module):
            chosen = [*args, *kwargs.values()][1].flatten()
            rows = torch.zeros(self._experts + 1, dtype=torch.int64, device=chosen.device)
            rows.scatter_add_(0, chosen.clamp(max=self._experts), torch.ones_like(chosen))
            self._rows = rows if self._rows is None else self._rows + rows

    def see(self, logits: Tensor) -> None:
        """Also count the entropy of the softmax of a router's logits `[..., experts]`."""
        if logits.shape[-1] == self._experts:
            share = logits.detach().double().softmax(dim=-1)
            both = torch.stack([-torch.xlogy(share, share).sum(), share.sum()])
            self._scores = both if self._scores is None else self._scores + both

    def forget(self) -> None:
        """Count anew."""
        self._rows = self._scores = None

    def take(self, axes: Axes) -> ExpertLoad:
        """The load since the last call, over all ranks. Collective."""
        rows, scores = self._rows, self._scores
        self.forget()
        own = torch.zeros(self._experts + 3, dtype=torch.float64, device=axes.device)
        if rows is not None:
            own[:-2] = rows
        if scores is not None:
            own[-2:] = scores
        *counts, _, entropy, tokens = axes.total(own, axes.within_replica).tolist()
        return load_of(torch.tensor(counts, dtype=torch.int64), entropy / tokens if tokens else None)


@dataclass(frozen=True)
class _RouterHook:
    """A forward hook on a router, whose output with number `index` are the logits."""

    counter: RowsCounter
    index: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _counts(module):
            self.counter.see(output if isinstance(output, Tensor) else output[self.index])


def _counts(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled() and not inside_backward()


_COUNTERS = Mark[RowsCounter]("terrazzo_rows_counter")


def count_rows(model: nn.Module) -> tuple[str, ...]:
    """Count the rows and router scores of a model of transformers from now on. To be called before it is cut.

    Returns:
        Names of experts whose router is not known: transformers does not say which module gives `router_logits`.
    """
    routers, blind = dict(_routers(model)), []
    for name, module in model.named_modules():
        if stacked_experts(module) is None:
            continue
        counter = _COUNTERS.leave(module, RowsCounter(int(module.num_experts)))
        module.register_forward_pre_hook(counter, with_kwargs=True)
        block = name.rpartition(".")[0]
        beside = [each for each in routers if each == block or each.startswith(f"{block}.")]
        if len(beside) == 1:
            model.get_submodule(beside[0]).register_forward_hook(_RouterHook(counter, routers[beside[0]]))
        else:
            blind.append(name)
    return tuple(blind)


def _routers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Names of the modules that give router logits, and which of their outputs these are, as transformers says."""
    known: dict[Any, int] = {}
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", ())
        for each in recorded if isinstance(recorded, list | tuple) else (recorded,):
            known[getattr(each, "target_class", each)] = getattr(each, "index", 0)
    for name, module in model.named_modules():
        if type(module) in known:
            yield name, known[type(module)]


def counters_of(model: nn.Module) -> Iterator[tuple[str, RowsCounter]]:
    """The counters of a model, by name of the experts."""
    for name, module in model.named_modules():
        if (counter := _COUNTERS.find(module)) is not None:
            yield name, counter
