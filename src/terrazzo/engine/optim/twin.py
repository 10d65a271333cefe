"""Steps of single tensors with an optimizer's own code, whatever that does once in a step beside them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.optim.settings import Settings, frozen
from terrazzo.engine.optim.stock import bare_copy, unhooked_step

__all__ = ["Twin"]


class Twin:
    """An optimizer's arithmetic and hyper-parameters as they are now, to step single tensors with.

    Args:
        optimizer: may change its hyper-parameters afterwards.
        first: number of its first param group among those of all the model's optimizers.
    """

    def __init__(self, optimizer: Optimizer, first: int) -> None:
        self._first = first
        self.state: dict[Tensor, dict[str, Any]] = optimizer.state
        self._settings = Settings(optimizer)
        self._twin = bare_copy(optimizer)

    def step(self, group: int, parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """Update `parameter` by its `.grad`; returns what the optimizer keeps for it from now on.

        Args:
            group: number of its param group, such as `Segment.group`.
            state: what it kept so far; empty before the first step.
        """
        twin = self._twin
        vars(twin).update(frozen(self._settings.attributes))  # a step counts once, however many tensors it has
        twin.state = defaultdict(dict, {parameter: state} if state else {})
        twin.param_groups = [{**frozen(self._settings.groups[group - self._first]), "params": [parameter]}]
        unhooked_step(twin)
        return dict(twin.state[parameter])

    def changed_since(self, optimizer: Optimizer) -> list[str]:
        """Hyper-parameters that `optimizer` has other values of now."""
        pairs = zip(self._settings.groups, optimizer.param_groups, strict=True)
        return sorted({key for old, new in pairs for key in old if key in new and not _equal(old[key], new[key])})


def _equal(old: Any, new: Any) -> bool:
    return bool(torch.as_tensor(old == new).all())
