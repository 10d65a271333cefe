"""Marks modules as `fully_shard` is called on them: the model is sharded when it is first run, or asked for its engine.

Only then is it known which module is the root.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

from terrazzo.engine import engine_of
from terrazzo.errors import BadInput, Misuse
from terrazzo.integrations.fsdp2.module import FSDPModule, ModuleMark
from terrazzo.integrations.fsdp2.sharding import SHARDED, WAITING, realize, rows_of
from terrazzo.integrations.fsdp2.states import place
from terrazzo.marks import MARKED_TO_SHARD

__all__ = ["fully_shard"]

T = TypeVar("T")


def fully_shard(  # structure: signature fixed by torch.distributed.fsdp.fully_shard
    module: T,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (it cannot change)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> T:
    """Mark a module, or each of a list, as a unit; the last call is for the model. As `torch.distributed.fsdp`'s.

    Args:
        module: it stays the same object, of a class derived from its own and `FSDPModule`.
        mesh: one axis to shard over, or one to replicate and one to shard over; all ranks on one axis by default.
        reshard_after_forward: True frees weights after forward, False keeps them, a number keeps them split over so
            many ranks. One for the whole model: the root's own weights are kept from forward to backward.
        shard_placement_fn: has no effect, and warns so: parameters lie in flat memory.
        mp_policy: as there, the same in every call for a model; so are `offload_policy` and `dp_mesh_dims`.
        ignored_params: must be empty.

    Returns:
        `module`.

    Raises:
        BadInput: here for what is no module or no policy; for the rest, and Misuse, when the model is sharded.
    """
    arguments = {name: value for name, value in locals().items() if name != "module"}
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise BadInput(f"fully_shard: mp_policy is {mp_policy!r}: give it torch's MixedPrecisionPolicy.")
    for each in module if isinstance(module, list) else [module]:
        if not isinstance(each, nn.Module):
            raise BadInput(
                f"fully_shard was called on a {type(each).__name__}: give it a module, or a list of modules."
            )
        _mark(each, arguments)
    return module


def _mark(module: nn.Module, arguments: dict[str, Any]) -> None:
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise BadInput(
            f"fully_shard was called on a {type(module).__name__}, which has no forward: call it on each item."
        )
    if isinstance(module, FSDPModule):
        raise Misuse(f"fully_shard was called twice on one {type(module).__name__}. Once is enough.")
    if any(isinstance(inner, FSDPModule) and inner._mark.root is not None for inner in module.modules()):
        raise Misuse(
            f"A module inside this {type(module).__name__} is sharded already, since it has run or was asked for its "
            "engine. Call fully_shard on all modules, the model last, before anything else."
        )
    if any(inner is module for model in SHARDED for inner in model.modules()):
        raise Misuse(
            f"fully_shard was called on a {type(module).__name__} inside a model that is sharded already. Call it on "
            "all modules, the model last, before anything else."
        )
    kind = type(module)
    names: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    if callable(own := getattr(kind, "generate", None)):
        names["generate"] = _once_sharded(own)
    module.__class__ = type(kind.__name__, (FSDPModule, kind), names)
    module.__dict__["_mark"] = MARKED_TO_SHARD.leave(module, ModuleMark(arguments, realize, rows_of))
    place(module.parameters(), arguments["mesh"])
    WAITING.add(module)


def _once_sharded(own: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` of a model that nothing may have run yet: sharding puts one before it that keeps ranks together."""

    @functools.wraps(own)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._mark.root is not None:
            return own(self, *args, **kwargs)
        engine_of(self)
        return self.generate(*args, **kwargs)

    return generate
