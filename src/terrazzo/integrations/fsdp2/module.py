"""What a module answers after `fully_shard`: torch's `FSDPModule`, method by method."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle

from terrazzo.engine import Engine, engine_of, register_forward_method
from terrazzo.errors import BadInput, Misuse
from terrazzo.integrations.fsdp2 import units
from terrazzo.integrations.fsdp2.states import RowPlacements, place, whole_value
from terrazzo.integrations.shared.first_rank import warn_once

__all__ = ["FSDPModule", "FSDPRoot", "ModuleMark", "register_fsdp_forward_method"]


@dataclass
class ModuleMark:
    """What is known of a module that `fully_shard` was called on.

    Attributes:
        arguments: of the call, by name.
        realize: shards the model that the module is in.
        rows: how tensors of the model that the module is in are shown.
        root: of the sharded model; None before.
        ahead: how many units ahead were to be gathered, before there was a root.
        divide_factor: asked for by `set_gradient_divide_factor`.
        uneven: on a root: whether that was asked for on a part of the units only, which must not stay so.
    """

    arguments: dict[str, Any]
    realize: Callable[[Any], None]
    rows: Callable[[Any], RowPlacements]
    root: weakref.ref[nn.Module] | None = None
    ahead: int = 0
    divide_factor: float | None = None
    uneven: bool = False


class FSDPModule(TorchFSDPModule):
    """Mixed into the class of every module that `fully_shard` was called on."""

    _mark: ModuleMark

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Slices of a container are of its original class."""
        original: Any = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._mark.root is None:
            self._mark.realize(self)
        if self._mark.uneven:
            raise Misuse(
                "set_gradient_divide_factor was called with one factor on some modules and with another, or none, on "
                "others. Call it with the same factor on every module that fully_shard was called on."
            )
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise Misuse("A module that fully_shard was called on cannot be deep-copied: copy the model before.")

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        if self._mark.root is None:
            nn.Module._apply(self, *args, **kwargs)  # type: ignore[arg-type]
            place(self.parameters(), self._mark.arguments["mesh"])  # type: ignore[attr-defined]
            return self
        self._root()._apply(*args, **kwargs)
        return self

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Each parameter as a DTensor, a copy of what this rank has of its rows; collective once the model is sharded.

        Trained weights are the master weights. Memory: this rank's rows, and one unit on its device. With `keep_vars`
        it lists the module's own parameters, as they are, of which some may be at rest.
        """
        if keep_vars or not dist.is_initialized():
            options = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
            return super().state_dict(**options)  # type: ignore[misc]
        root = self._mark.root() if self._mark.root is not None else None
        rows: RowPlacements = self._mark.rows(self)
        return rows.of_module(self, root, destination, prefix)  # type: ignore[arg-type]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load into a model that is not sharded yet: full tensors, or DTensors, which are gathered one by one."""
        whole = {name: whole_value(value) for name, value in state_dict.items()}
        unmatched = super().load_state_dict(whole, *args, **kwargs)  # type: ignore[misc]
        place(self.parameters(), self._mark.arguments["mesh"])  # type: ignore[attr-defined]
        return unmatched

    @property
    def _terrazzo(self) -> Engine:
        """The engine, for whoever asks for that of a sharded model: asking shards a model that is not yet."""
        if self._mark.root is None:
            self._mark.realize(self)
        if "_terrazzo" not in self.__dict__:
            raise AttributeError("_terrazzo")  # not a root
        engine: Engine = self.__dict__["_terrazzo"]
        return engine

    @_terrazzo.setter
    def _terrazzo(self, engine: Engine) -> None:
        self.__dict__["_terrazzo"] = engine  # where `is_sharded` looks

    def _root(self) -> nn.Module:
        if self._mark.root is None:
            self._mark.realize(self)
        root = self._mark.root() if self._mark.root is not None else None
        assert root is not None, "the model is gone"
        return root

    def _get_fsdp_state(self) -> NoReturn:
        """Where the methods of torch's class end that are not among those below."""
        raise Misuse("This method reaches into torch's own engine for something that Terrazzo's has none of.")

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's weights, those of its own unit; every rank must. They go after its next forward."""
        handle = _Handle(units.gather(engine_of(self._root()), self))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Give back the memory of this module's gathered weights."""
        units.put_back(engine_of(self._root()), self)

    def reset_iter_state(self) -> None:
        """After a forward or backward that raised: the engine recovers by itself, and gradients are forgotten."""
        self._root().zero_grad()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: the next backward passes only add gradients on this rank. For the whole model at once."""
        self._set_sync(requires_gradient_sync, recurse, each=False)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: the next backward passes reduce gradients inside a replica only. For the whole model at once."""
        if units.has_replicas(engine_of(self._root())):
            self._set_sync(requires_all_reduce, recurse, each=True)

    def _set_sync(self, required: bool, recurse: bool, *, each: bool) -> None:
        engine = engine_of(self._root())
        whole = id(self) == id(self._root()) and (recurse or len(engine.units) == 1)
        if not whole and required != units.reduces(engine):
            raise Misuse(
                "Reduction of gradients was switched for a part of the model; it is on or off for all of it. Call "
                "set_requires_gradient_sync on the model that fully_shard was called on last, with recurse=True."
            )
        units.set_reduces(engine, required, each=each)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients by `factor` and not by the number of ranks; to be called on every module of the model."""
        if not factor > 0:
            raise BadInput(f"set_gradient_divide_factor({factor}): it must be positive.")
        root: Any = self._root()
        self._mark.divide_factor = float(factor)
        modules = [unit.module for unit in engine_of(root).units]
        factors = {module._mark.divide_factor for module in modules if isinstance(module, FSDPModule)}
        root._mark.uneven = len(factors) > 1
        root.set_gradient_denominator(float(factor))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # the older name

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Gather as many units ahead as are named. Which they are follows from the order of the run."""
        if self._mark.root is None:
            self._mark.ahead = max(self._mark.ahead, len(modules))
        else:
            units.gather_ahead(engine_of(self._root()), len(modules))

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch  # there is one depth for both


class FSDPRoot(nn.Module):
    """Mixed into the class of a model of `fully_shard` once it is sharded, before what any sharded model has."""

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As of any of its modules."""
        if keep_vars:
            return super().state_dict(destination=destination, prefix=prefix, keep_vars=True)
        return FSDPModule.state_dict(self, destination=destination, prefix=prefix)  # type: ignore[arg-type]


WITHOUT_EFFECT = {
    "set_reshard_after_forward": "the plan is fixed when the model is sharded",
    "set_reshard_after_backward": "weights are always freed after backward",
    "set_is_last_backward": "every backward waits for the reductions that it started",
    "set_unshard_in_backward": "backward gathers what it needs",
    "set_post_optim_event": "the engine orders its own gathers",
    "set_reduce_scatter_unused_params": "ranks may always use different parameters",
    "set_reduce_scatter_max_input_buffers": "the engine has its own buffers",
    "set_separate_reduce_scatter_group": "the engine has its own collectives",
    "set_force_sum_reduction_for_comms": "gradients are always summed, then divided once",
    "set_allocate_memory_from_process_group_for_comm": "the engine has its own buffers",
    "set_symm_mem_for_comm": "the engine has its own buffers",
}
"""Methods that change no number, and why they change nothing at all here."""


def _without_effect(name: str, why: str) -> Callable[..., None]:
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        warn_once(f"{name} has no effect on a model sharded by terrazzo.fully_shard: {why}.")

    return method


for _name, _why in WITHOUT_EFFECT.items():
    setattr(FSDPModule, _name, _without_effect(_name, _why))


class _Handle(UnshardHandle):
    """Waits for one unit's gather, once."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let weights be gathered around `module.method_name(...)` as they are around its forward.

    Does nothing for a module that `fully_shard` was not called on.

    Raises:
        BadInput: there is no such method.
    """
    if isinstance(module, FSDPModule):
        register_forward_method(module, method_name)
