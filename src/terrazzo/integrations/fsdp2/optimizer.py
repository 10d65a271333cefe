"""What an optimizer answers once `fully_shard` has taken it over: as before, in terms of the model's parameters.

So `get_optimizer_state_dict` and its kin of `torch.distributed.checkpoint` find what they know from torch's FSDP2:
parameters in `param_groups`, and in `state_dict()` a DTensor for each state of each.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine import Engine, OptimizerStates, Zeros, engine_of
from terrazzo.errors import BadInput
from terrazzo.integrations.fsdp2.states import Rows, whole_value

__all__ = ["FSDPOptimizer", "take_over"]


class FSDPOptimizer(Optimizer):
    """Mixed into the class of an optimizer that steps a model of `fully_shard`."""

    _model: weakref.ref[nn.Module]
    _rows: Rows

    def _states(self) -> OptimizerStates:
        model = self._model()
        assert model is not None, "the model is gone"
        return OptimizerStates(engine_of(model), self)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with DTensors, by the numbers of parameters. Collective.

        Memory: this rank's rows, and one state of one unit whole on its device. Where no parameter has a state yet, it
        is what a step on zero gradients would leave, as `get_optimizer_state_dict` has it.
        """
        states = self._states()
        numbers = {name: number for number, name in enumerate(states.names())}
        shown: dict[int, dict[str, Any]] = defaultdict(dict)
        for name, kind, value in states.whole():
            split = isinstance(value, Tensor) and value.dim() > 0
            shown[numbers[name]][kind] = self._rows.split(value) if split else value
        groups, first = [], 0
        for group in self.param_groups:
            count = len(group["params"])
            kept = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**kept, "params": list(range(first, first + count))})
            first += count
        return {"state": dict(sorted(shown.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """From `state_dict()` of this class or of a plain optimizer, by the order of parameters. Collective.

        Raises:
            BadInput: where groups are of other sizes.
        """
        given = state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in groups] for groups in (given, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise BadInput(
                f"The optimizer's state has param groups of {sizes[0]} parameters, and this {type(self).__name__} has "
                f"{sizes[1]}: build it over the same parameters, in the same order."
            )
        states = self._states()
        keys = [key for group in given for key in group["params"]]
        loaded = zip(states.names(), keys, strict=True)
        states.load({name: _Whole(state_dict["state"].get(key, {})) for name, key in loaded})
        for group, other in zip(self.param_groups, given, strict=True):
            group.update({key: value for key, value in other.items() if key not in ("params", "param_names")})


class _Whole(Mapping[str, Any]):
    """States of one parameter, each gathered as it is read."""

    def __init__(self, states: Mapping[str, Any]) -> None:
        self._states = states

    def __getitem__(self, kind: str) -> Any:
        return whole_value(self._states[kind])

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


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


def take_over(optimizer: Optimizer, model: nn.Module, rows: Rows) -> None:
    """Turn an optimizer that is attached to `model` into an `FSDPOptimizer` of its own class, in place."""
    engine, kind = engine_of(model), type(optimizer)
    optimizer.__class__ = type(kind.__name__, (FSDPOptimizer, kind), {"__module__": kind.__module__})
    optimizer._model, optimizer._rows = weakref.ref(model), rows  # type: ignore[attr-defined]
    optimizer.state = _Begun(optimizer.state, engine)
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if isinstance(parameter.grad, Zeros):
            parameter.grad = None
