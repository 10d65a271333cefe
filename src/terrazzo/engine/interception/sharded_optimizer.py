"""What an optimizer answers differently once it drives a sharded model: state, zeroing, saving, copying."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from terrazzo.engine.buckets.parameters.note import sharded_name
from terrazzo.engine.interception.collective_calls import giving_states, on_every_rank, taking_states
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.optim.driver import OptimizerDriver
from terrazzo.engine.states.optimizer_states import OptimizerStates
from terrazzo.errors import Misuse

__all__ = ["ShardedOptimizer", "make_sharded_optimizer"]

_STATE_DICT = giving_states("optimizer.state_dict()")
_LOAD_STATE_DICT = taking_states("optimizer.load_state_dict(state)")


class FlatStates(defaultdict[Any, dict[str, Any]]):
    """An optimizer's states by the tensors that it steps: flat parts of many parameters, on this rank alone.

    In plain PyTorch they are the parameters. Asked for one of these, a dict would make an empty entry; given one, it
    would keep what no step reads.
    """

    def __init__(self, states: Mapping[Any, dict[str, Any]]) -> None:
        super().__init__(dict)
        self.update(states)

    def __missing__(self, key: Any) -> dict[str, Any]:
        _refuse_lookup(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        _refuse_lookup(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        _refuse_lookup(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        _refuse_lookup(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        _refuse_lookup(key)
        return super().setdefault(key, default)

    def __setitem__(self, key: Any, value: dict[str, Any]) -> None:
        _refuse_lookup(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        _refuse_lookup(key)
        super().__delitem__(key)

    def update(self, *others: Any, **named: Any) -> None:
        for key, value in dict(*others, **named).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]
        self.update(other)
        return self


def _refuse_lookup(key: object) -> None:
    if isinstance(key, nn.Parameter) and (name := sharded_name(key)) is not None:
        raise Misuse(
            f"The optimizer's state was asked for {name!r}, or given; it is kept for flat parts of many "
            "parameters, this rank's alone. To change all of it, 'for kept in optimizer.state.values():' has the "
            "tensors, on every rank. tz.checkpoint.save(path, model, optimizer) writes it down by names of parameters."
        )


class ShardedOptimizer(Optimizer):
    """Mixed into the class of an optimizer that drives a sharded model."""

    _driver: OptimizerDriver

    @property
    def state(self) -> Any:
        """The states of each tensor that is stepped; an update that is under way ends first."""
        if (driver := vars(self).get("_driver")) is not None:
            driver.await_states()
        return vars(self)["state"]

    @state.setter
    def state(self, state: Any) -> None:
        driven = "_driver" in vars(self) and type(state) in (dict, defaultdict)
        vars(self)["state"] = FlatStates(state) if driven else state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of its own parameters, and do what else its class does then."""
        self._driver.zero_grad(set_to_none)
        if self._driver.kind.zero_grad is not Optimizer.zero_grad:
            super().zero_grad() if set_to_none else super().zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook as torch does; it is called before weights are made ready for the step, whenever it comes."""
        handle = super().register_step_pre_hook(hook)
        self._driver.stay_innermost(self)
        return handle

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook as torch does: it finds the new weights in the parameters."""
        handle = super().register_step_post_hook(hook)
        self._driver.stay_innermost(self)
        return handle

    @property
    def skipped_steps(self) -> int:
        """Steps that a non-finite fp16 gradient on any rank has cancelled."""
        return self._driver.loss_scale.skipped_steps

    @property
    def loss_scale(self) -> float:
        """The factor now applied to gradients inside the model; 1 without loss scaling."""
        return self._driver.loss_scale.scale

    def scaler_state(self) -> dict[str, float]:
        """The loss scaler's counters as plain numbers; empty without loss scaling."""
        return self._driver.loss_scale.state()

    def load_scaler_state(self, state: dict[str, float]) -> None:
        """Go on with what `scaler_state` gave, the same on every rank.

        Raises:
            BadInput: for what it cannot have given, before anything is changed.
            Misuse: while gradients are accumulated, which have been multiplied by another scale.
        """
        self._driver.loss_scale.load_state(state, self._driver.accumulating)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise Misuse(
            "A sharded optimizer cannot take further param groups: give it all of them before tz.shard. Parameters of "
            "the model that no optimizer has can get one of their own, by tz.attach(model, optimizer)."
        )

    def state_dict(self) -> Any:
        """The state dict that the optimizer would have over whole parameters, on every rank. Collective.

        A plain optimizer over the same parameters loads it. Full states are in host memory, in the dtype of moments:
        all of them on each rank, put together one bucket after the other on the mesh's device. The loss scale is in
        `scaler_state()`; an average of the weights, and residuals of error feedback, are in checkpoints alone.

        Raises:
            RanksApart: where ranks do something else meanwhile.
            Misuse: for a model in stages, or inside `ema.swapped`.
        """
        states = self.states()
        with on_every_rank(states.engine, _STATE_DICT):
            return states.state_dict(lambda value: value.to("cpu", copy=True))

    def load_state_dict(self, state_dict: Any) -> None:
        """Take all states and the settings of param groups from a plain optimizer's state dict. Collective.

        It may come from any plan and number of ranks, or from plain PyTorch. Parameters are known by their order. This
        rank's parts are copied. Where the settings do not choose a kernel, the engine does, as in `tz.shard`.
        Residuals of error feedback become zero.

        Args:
            state_dict: full tensors of any dtype, the same on every rank.

        Raises:
            BadInput: for what is no optimizer's state dict, groups of other sizes, and states of other kinds or shapes,
                on any rank. No state and no setting has been changed by then, but hooks from before loading have been
                called.
            RanksApart: where ranks were given other states, likewise.
            Misuse: for a model in stages, or inside `ema.swapped` or `tz.gathered(model, write=True)`.
        """
        states = self.states()
        with on_every_rank(states.engine, _LOAD_STATE_DICT):
            states.load_state_dict(state_dict)

    def states(self) -> OptimizerStates:
        """The states that the optimizer keeps.

        Raises:
            Misuse: where its model is gone, or has got another optimizer.
        """
        engine = self._driver.model
        assert isinstance(engine, Engine)
        return OptimizerStates(engine, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise Misuse(
            f"A sharded {type(self).__name__} cannot be deep-copied: its tensors are views of master weights. "
            "Copy it before tz.shard, or build another one for another model."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Misuse(
            f"A sharded {type(self).__name__} cannot be pickled, and so not saved with torch.save: it has this rank's "
            "flat shards alone. Save with tz.checkpoint.save(path, model, optimizer)."
        )


def make_sharded_optimizer(optimizer: Optimizer, driver: OptimizerDriver) -> None:
    """Turn `optimizer` into a `ShardedOptimizer` of its own class, in place."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (ShardedOptimizer, kind), {"__module__": kind.__module__})
    optimizer._driver = driver  # type: ignore[attr-defined]
    optimizer.state = vars(optimizer)["state"]
