"""What an optimizer answers once `fully_shard` has taken it over: as before, in terms of the model's parameters.

So `get_optimizer_state_dict` and its kin of `torch.distributed.checkpoint` find what they know from torch's FSDP2:
parameters in `param_groups`, and in `state_dict()` a DTensor for each state of each.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from terrazzo.engine import Engine, ShardedOptimizer, Zeros, engine_of
from terrazzo.integrations.fsdp2.states import RowPlacements, whole_value

__all__ = ["FSDPOptimizer", "take_over"]


class FSDPOptimizer(ShardedOptimizer):
    """Mixed into the class of an optimizer that steps a model of `fully_shard`."""

    _rows: RowPlacements

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with DTensors, by the numbers of parameters. Collective.

        Memory: this rank's rows, and one state of one unit whole on its device. Where no parameter has a state yet, it
        is what a step on zero gradients would leave, as `get_optimizer_state_dict` has it.
        """
        return self.states().state_dict(self._rows.split, begun=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """From `state_dict()` of this class or of a plain optimizer, by the order of parameters. Collective.

        Raises:
            BadInput: where groups are of other sizes.
        """
        self.states().load_state_dict(state_dict, whole_value)


class _Begun(defaultdict[Any, dict[str, Any]]):
    """An optimizer's state, by what it steps; of a parameter it can be asked which kinds there are, and no values.

    It is never false: `torch.distributed.checkpoint` would step an optimizer without state, on the ranks without any.
    """

    def __init__(self, states: Mapping[Any, dict[str, Any]], engine: Engine) -> None:
        super().__init__(dict, states)
        self._engine = weakref.ref(engine)

    def __bool__(self) -> bool:
        return True

    def __missing__(self, key: Any) -> dict[str, Any]:
        if (engine := self._engine()) is not None and isinstance(key, nn.Parameter):
            members = (member for bucket in engine.trainable() for member in bucket.members)
            if (member := next((each for each in members if each.parameter is key), None)) is not None:
                return dict.fromkeys(engine.drivers.templates[member.group])
        return super().__missing__(key)


def take_over(optimizer: Optimizer, model: nn.Module, rows: RowPlacements) -> None:
    """Turn an optimizer that is attached to `model` into an `FSDPOptimizer` of its own class, in place."""
    engine, kind = engine_of(model), type(optimizer)
    optimizer.__class__ = type(kind.__name__, (FSDPOptimizer, kind), {"__module__": kind.__module__})
    optimizer._rows = rows  # type: ignore[attr-defined]
    optimizer.state = _Begun(optimizer.state, engine)
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if isinstance(parameter.grad, Zeros):
            parameter.grad = None
