"""Experts of `transformers`, whose matrices are stacked. Ranks share them, and the model's own code computes.

Such a module is called with tokens, the numbers of each token's experts, and their weights. Its forward is replaced:

1. Each token becomes one row for each of its experts, and rows go to the ranks that have these.
2. The module's own forward computes the arrived rows, as if this rank's experts were all, with weights of 1.
3. Outputs come back, are multiplied by the weights, and added up in the order in which the router chose the experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from terrazzo.engine.runtime.method_replacement import MethodReplacement, replaced_of
from terrazzo.engine.runtime.private_torch import uncompiled_once_called
from terrazzo.parallel.expert.dispatch import Experts
from terrazzo.parallel.expert.row_order import RowOrder

__all__ = ["StackedExperts", "looks_like_experts", "stacked_experts"]


class StackedExperts:
    """A module that transformers' `use_experts_implementation` has decorated, as one that ranks can share."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module

    def stacked(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._module.named_parameters(recurse=False))

    def use_experts(self, experts: Experts) -> None:
        self._module.num_experts = experts.count // experts.ranks.size
        self._module.forward = _SharedForward(self._module, replaced_of(self._module, "forward"), experts)


def stacked_experts(module: nn.Module) -> StackedExperts | None:
    """What shares the experts of a module of `transformers`; None for another, and for experts with more than stacks.

    Not those with norms beside the stacks, say, or with buffers: nobody has tried them.
    """
    count = getattr(module, "num_experts", None)
    own = [each.shape[:1] == (count,) for each in module.parameters(recurse=False)]
    whole = len(own) == len(list(module.parameters())) and not any(True for _ in module.buffers())
    return StackedExperts(module) if hasattr(module, "_is_expert_parallel") and own and all(own) and whole else None


def looks_like_experts(module: nn.Module) -> bool:
    """Whether a module is a mixture's experts by its name: a class of `Experts` with stacks, or that has a list so."""
    named = [child for name, child in module.named_children() if name == "experts"]
    stacks = any(each.dim() > 2 for each in module.parameters(recurse=False))
    is_stack = stacks and re.search(r"Experts$", type(module).__name__) is not None
    return is_stack or any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in named)


class _SharedForward(MethodReplacement):
    """In the place of a module's forward, which computes with the matrices that the module has by then."""

    def __init__(self, module: nn.Module, replaced: Callable[..., Tensor] | None, experts: Experts) -> None:
        super().__init__(module, "forward", replaced)
        self.experts, self._names = experts, list(self.__signature__.parameters)[:3]

    def __reduce__(self) -> tuple[Any, ...]:
        return _SharedForward, (self.module, self.replaced, self.experts)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The mixture `[T, channels]` for tokens of that shape, by int64 numbers of experts and weights, `[T, top_k]`.

        A number that is none of an expert's has nothing computed, and adds zeros.
        """
        return self._mix(*args, *(kwargs[name] for name in self._names[len(args) :]))

    @uncompiled_once_called  # compiled, it would be a graph for each number of rows
    def _mix(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        top_k, expert = chosen.shape[-1], chosen.reshape(-1)
        order, count = RowOrder.by(expert), self.experts.count
        counts = torch.bincount(expert, minlength=count)[:count].cpu()
        rows = order.sort(tokens.repeat_interleave(top_k, dim=0))
        arrived, route = self.experts.dispatch(rows[: int(counts.sum())], counts)
        outputs = self.experts.combine(self._own(arrived, route.counts), route)
        outputs = torch.cat([outputs, outputs.new_zeros(len(rows) - len(outputs), *outputs.shape[1:])])
        each = order.restore(outputs) * weights.reshape(-1, 1)
        mixed: Tensor = each.unflatten(0, (len(tokens), top_k)).sum(dim=1)
        return mixed.to(tokens.dtype)

    def _own(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What this rank's experts give for `rows` `[rows, channels]`, sorted by expert, `counts` for each."""
        if not len(rows):  # some of these forwards return what does not depend on anything then
            return rows + torch.stack([each.reshape(-1)[:0].sum() for each in self.module.parameters()]).sum()
        expert = torch.arange(len(counts)).repeat_interleave(counts).unsqueeze(-1).to(rows.device)
        own: Tensor = self.bound()(rows, expert, torch.ones_like(expert, dtype=rows.dtype))
        return own
