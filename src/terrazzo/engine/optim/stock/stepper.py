"""Steps of single tensors with an optimizer's own code, whatever that does once in a step beside them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.optim.stock.settings import STEP_HOOKS, Settings, snapshot

__all__ = ["Stepper", "bare_copy", "bring_back", "is_driven", "is_torchs", "unhooked_step"]


class Stepper:
    """An optimizer's arithmetic and hyper-parameters as they are now, to step single tensors with.

    Args:
        optimizer: may change its hyper-parameters afterwards.
        first: number of its first param group among those of all the model's optimizers.

    Attributes:
        is_own: whether it is of a user's own class, which may read any param group in its step, and change parameters
            that have no gradient.
    """

    def __init__(self, optimizer: Optimizer, first: int = 0) -> None:
        self._first = first
        self.state: dict[Tensor, dict[str, Any]] = optimizer.state
        self._settings = Settings(optimizer)
        self.is_own = not is_torchs(optimizer)
        self._copy = bare_copy(optimizer)

    def step(self, group: int, parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """Update `parameter` by its `.grad`, if any; returns what the optimizer keeps for it from now on.

        Args:
            group: number of its param group, such as `Segment.group`.
            state: what it kept so far; empty before the first step.
        """
        copy = self._copy
        vars(copy).update(snapshot(self._settings.attributes))  # a step counts once, however many tensors it has
        copy.state = defaultdict(dict, {parameter: dict(state)} if state else {})
        number, groups = group - self._first, self._settings.groups
        shown = enumerate(groups) if self.is_own else [(number, groups[number])]
        copy.param_groups = [{**snapshot(each), "params": [parameter] if i == number else []} for i, each in shown]
        values = parameter.detach()
        unhooked_step(copy)
        bring_back(parameter, values)
        return dict(copy.state[parameter])

    def changed_since(self, optimizer: Optimizer) -> list[str]:
        """Hyper-parameters that `optimizer` has other values of now."""
        pairs = zip(self._settings.groups, optimizer.param_groups, strict=True)
        return sorted({key for old, new in pairs for key in old if key in new and not _equal(old[key], new[key])})


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether its class is one of torch's or Terrazzo's, or that of a sharded one made from it."""
    return type(optimizer).__module__.startswith(("torch.optim.", "terrazzo.optim."))


def is_driven(optimizer: Optimizer) -> bool:
    """Whether it drives a sharded model, or has done so until that let go of it."""
    return "_driver" in vars(optimizer)


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """One of its class with its states, and attributes of its own; it knows nothing of the model and has no hooks."""
    copied = object.__new__(type(optimizer))  # copy.copy would drop attributes that are not in its __getstate__
    ties = ("_driver", "step")  # they lead to the model
    copied.__dict__.update({key: value for key, value in vars(optimizer).items() if key not in ties})
    copied.__dict__.update({key: OrderedDict() for key in STEP_HOOKS})  # so do these, and a base class's step asks
    copied.__dict__.update(Settings(copied).attributes)
    return copied


def bring_back(parameter: nn.Parameter, values: Tensor) -> None:
    """An update has given `parameter` other memory, by `p.data = ...`, where others look for them in `values`."""
    if parameter.data_ptr() != values.data_ptr():
        with torch.no_grad():
            values.copy_(parameter.detach())
        parameter.data = values


def unhooked_step(optimizer: Optimizer) -> None:
    """The optimizer class's own update, without step hooks, profiling or a scheduler's wrapper."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _equal(old: Any, new: Any) -> bool:
    return bool(torch.as_tensor(old == new).all())
