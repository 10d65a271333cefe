"""State of an optimizer as torch has it, in a state dict over whole parameters: given out, and loaded."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.optim.stock.param_groups import take_fused
from terrazzo.engine.optim.stock.settings import NOT_HYPER
from terrazzo.engine.optim.stock.stepper import bare_copy
from terrazzo.engine.pipeline.stages import require_whole
from terrazzo.engine.states.given_states import take_states, warn_of_unstepped
from terrazzo.engine.states.stepped_parameters import SteppedParameters
from terrazzo.engine.states.whole_states import States, whole_states
from terrazzo.errors import BadInput
from terrazzo.messages import listed

__all__ = ["OptimizerStates"]


class OptimizerStates:
    """State that one optimizer of a sharded model keeps.

    Attributes:
        engine: of the model.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        require_whole(engine.axes, "The whole state of an optimizer")
        self.engine, self._stepped = engine, SteppedParameters(engine, optimizer)

    def names(self) -> list[str]:
        """The names of the parameters that the optimizer was built over, in its order."""
        return [name for _, name in self._stepped.named()]

    def whole(self, begun: bool = False) -> Iterator[tuple[str, str, Any]]:
        """Yield each state of each parameter that has any: name, kind, and the value as in one process. Collective.

        As `whole_states`, which see: what is per element is to be copied before the next is asked for.
        """
        return whole_states(self._stepped, begun)

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Set all state, from full tensors by name and kind; a parameter that has none there loses its own. Collective.

        As `take_states`, which see.
        """
        take_states(self._stepped, states)

    def state_dict(self, keep: Callable[[Tensor], Tensor], begun: bool = False) -> dict[str, Any]:
        """State dict as the optimizer's class has it, over whole parameters: hooks for them are called. Collective.

        Memory: what is kept, and one state of one bucket on the mesh's device.

        Args:
            keep: what is to be in the place of a tensor, full and only here until the next one comes.
            begun: whether parameters have states before the first step: those that one on zero gradients would leave.
        """
        self.engine.requires.at_rest("optimizer.state_dict()", reads="states")
        shown: dict[str, States] = defaultdict(dict)
        for name, kind, value in self.whole(begun):
            shown[name][kind] = keep(value) if isinstance(value, Tensor) and value.dim() else value
        alone, kind_of = bare_copy(self._stepped.optimizer), self._stepped.driver.kind
        alone.state = defaultdict(dict)
        for parameter, name in ((parameter, name) for parameter, name in self._stepped.named() if name in shown):
            alone.state[parameter] = {
                kind: shown[name][kind] for kind in self._stepped.template_of(name) if kind in shown[name]
            }
        state_dict: dict[str, Any] = kind_of.state_dict(alone)
        return state_dict

    def load_state_dict(self, state_dict: Any, whole: Callable[[Any], Any] = lambda value: value) -> None:
        """Set all state and the settings of param groups from a state dict over whole parameters. Collective.

        Residuals of its parameters' gradients become zero: the dict has none, and those here are of another run. Warns
        of states of frozen parameters, which nothing keeps.

        Args:
            state_dict: the same on every rank, by the order of parameters.
            whole: makes a tensor of a state there, which is looked up once, in the same order on every rank.

        Raises:
            BadInput: for what is no optimizer's state dict, groups of different sizes, and states of different kinds or
                shapes, on any rank. Hooks from before loading have been called by then, and nothing else has been done.
            RanksApart: where ranks were given different states, likewise.
        """
        optimizer = self._stepped.optimizer
        edited = all_or_none(self.engine.axes, lambda: self._checked(state_dict))
        names = self.names()
        keys = [key for group in edited["param_groups"] for key in group["params"]]
        given = {name: edited["state"].get(key, {}) for name, key in zip(names, keys, strict=True)}
        self.load({name: _Whole(states, whole) for name, states in given.items()})
        warn_of_unstepped({name: states for name, states in given.items() if name not in self._stepped.located})
        for bucket, index in self._stepped.located.values():
            for residual in bucket.gradient.residuals:
                residual.clear([index])
        for group, other in zip(optimizer.param_groups, edited["param_groups"], strict=True):
            is_fused = group.get("fused")  # as the plan's tiers need, perhaps: the run goes on with its own kernel
            group.update(copy.deepcopy({key: value for key, value in other.items() if key not in NOT_HYPER}))
            if is_fused:
                take_fused(group)
        for after in optimizer._optimizer_load_state_dict_post_hooks.values():
            after(optimizer)

    def _checked(self, state_dict: Any) -> dict[str, Any]:
        """Return a state dict as hooks change it.

        Raises:
            BadInput: where it is none, or of different parameters.
        """
        _check_form(state_dict)
        kind, optimizer, edited = self._stepped.driver.kind, self._stepped.optimizer, dict(state_dict)
        if kind.load_state_dict is not Optimizer.load_state_dict:
            raise BadInput(
                f"{kind.__name__} has a load_state_dict of its own, which a sharded optimizer does not "
                "call. Do what it does in a hook, optimizer.register_load_state_dict_post_hook, or load before "
                "tz.shard."
            )
        for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
            changed = before(optimizer, edited)
            edited = edited if changed is None else changed
        _check_form(edited)
        sizes = [
            [len(group["params"]) for group in groups] for groups in (edited["param_groups"], optimizer.param_groups)
        ]
        if sizes[0] != sizes[1]:
            raise BadInput(
                f"The optimizer's state has param groups of {sizes[0]} parameters, and this {kind.__name__} has "
                f"{sizes[1]}: build it over the same parameters, in the same order."
            )
        return edited


class _Whole(Mapping[str, Any]):
    """States of one parameter, each made whole as it is read; one that is None is not there."""

    def __init__(self, states: Mapping[str, Any], whole: Callable[[Any], Any]) -> None:
        self._states, self._whole = {kind: value for kind, value in states.items() if value is not None}, whole

    def __getitem__(self, kind: str) -> Any:
        return self._whole(self._states[kind])

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def _check_form(state_dict: Any) -> None:
    """Refuse what does not have the form of an optimizer's state dict.

    Raises:
        BadInput: there.
    """
    if not (isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()):
        raise BadInput(
            f"optimizer.load_state_dict takes what optimizer.state_dict() gives, not {_described(state_dict)}. Of a "
            "program's whole file that is one entry; tz.checkpoint.load(path, model, optimizer) reads all of it."
        )
    states, groups = state_dict["state"], state_dict["param_groups"]
    if not (isinstance(states, Mapping) and all(isinstance(each, Mapping) for each in states.values())):
        raise BadInput(
            f"optimizer.load_state_dict: 'state' is {_described(states)}, and is to have a dict for each parameter, by "
            "number. Give what optimizer.state_dict() gave."
        )
    if not (isinstance(groups, list | tuple) and all(isinstance(g, Mapping) and "params" in g for g in groups)):
        raise BadInput(
            f"optimizer.load_state_dict: 'param_groups' is {_described(groups)}, and is to be a list of dicts with "
            "'params'. Give what optimizer.state_dict() gave."
        )


def _described(value: Any) -> str:
    return f"a dict of {listed([*map(repr, value)], 5)}" if isinstance(value, Mapping) else f"a {type(value).__name__}"
