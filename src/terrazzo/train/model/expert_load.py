"""How busy experts are: how many rows each got in a training step, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine import inside_backward
from terrazzo.engine.mesh.axes import Axes
from terrazzo.marks import SHARES_MATRICES, Mark
from terrazzo.parallel import stacked_experts

__all__ = [
    "PADDING_MASK",
    "ExpertLoad",
    "RowsCounter",
    "count_rows",
    "counters_of",
    "counts_rows",
    "load_of",
    "part_of_padding",
]

PADDING_MASK = "padding_mask"
"""The name of what models with experts are given: bool, of the shape of the tokens, True where there is no token."""


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


def part_of_padding(model: nn.Module, mask: Tensor | None) -> Tensor | None:
    """Of a mask over the tokens that `model` is given, what this rank's experts compute: along tp each has a part."""
    ranks = SHARES_MATRICES.find(model)
    if mask is None or ranks is None:
        return mask
    part: Tensor = ranks.scatter_sequence(mask.unsqueeze(-1)).squeeze(-1)
    return part


@dataclass
class _GivenPadding:
    """Hooks on a model of transformers that keep its padding mask for the counters in it while its forward runs.

    Attributes:
        mask: bool `[tokens, 1]`; None where there is no padding.
    """

    mask: Tensor | None = None

    def take(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = part_of_padding(model, kwargs.pop(PADDING_MASK, None))
        self.mask = None if mask is None else mask.reshape(-1, 1)
        return args, kwargs

    def drop(self, model: nn.Module, args: Any, output: Any) -> None:
        self.mask = None


class RowsCounter:
    """A forward pre-hook on experts of transformers: counts each expert's rows in training, without recomputation."""

    def __init__(self, experts: int, padding: _GivenPadding) -> None:
        self._experts, self._padding = experts, padding
        self._rows: Tensor | None = None
        self._scores: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _counts(module):
            chosen = [*args, *kwargs.values()][1]
            if (mask := self._padding.mask) is not None:
                chosen = chosen.masked_fill(mask, self._experts)
            chosen = chosen.flatten()
            rows = torch.zeros(self._experts + 1, dtype=torch.int64, device=chosen.device)
            rows.scatter_add_(0, chosen.clamp(max=self._experts), torch.ones_like(chosen))
            self._rows = rows if self._rows is None else self._rows + rows

    def see(self, logits: Tensor) -> None:
        """Also count the entropy of the softmax of a router's logits `[..., experts]`."""
        if logits.shape[-1] == self._experts:
            share = logits.detach().double().softmax(dim=-1).reshape(-1, self._experts)
            if (mask := self._padding.mask) is not None:
                share = share.masked_fill(mask, 0)
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
_PADDING = Mark[_GivenPadding]("terrazzo_given_padding")


def count_rows(model: nn.Module) -> tuple[str, ...]:
    """Count the rows and router scores of a model of transformers from now on. To be called before it is cut.

    Returns:
        Names of experts whose router is not known: transformers does not say which module gives `router_logits`.
    """
    routers, blind, padding = dict(_routers(model)), [], _GivenPadding()
    for name, module in model.named_modules():
        if stacked_experts(module) is None:
            continue
        counter = _COUNTERS.leave(module, RowsCounter(int(module.num_experts), padding))
        module.register_forward_pre_hook(counter, with_kwargs=True)
        block = name.rpartition(".")[0]
        beside = [each for each in routers if each == block or each.startswith(f"{block}.")]
        if len(beside) == 1:
            model.get_submodule(beside[0]).register_forward_hook(_RouterHook(counter, routers[beside[0]]))
        else:
            blind.append(name)
    if any(True for _ in counters_of(model)):
        _PADDING.leave(model, padding)
        model.register_forward_pre_hook(padding.take, with_kwargs=True)
        model.register_forward_hook(padding.drop, always_call=True)
    return tuple(blind)


def counts_rows(model: nn.Module) -> bool:
    """Whether `count_rows` has found experts in `model`, which takes a padding mask then."""
    return _PADDING.find(model) is not None


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
