"""Shards a model of marked modules, and takes over its optimizer, which is built later, in its first step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from terrazzo.engine import attach, engine_of, on_unattached_step
from terrazzo.engine.runtime.private_torch import tree_map_only
from terrazzo.errors import Misuse
from terrazzo.integrations.fsdp2 import units
from terrazzo.integrations.fsdp2.module import FSDPModule, FSDPRoot
from terrazzo.integrations.fsdp2.optimizer import take_over
from terrazzo.integrations.fsdp2.requested import device_of, requested_setup
from terrazzo.integrations.fsdp2.states import RowPlacements, place

__all__ = ["SHARDED", "WAITING", "realize", "rows_of"]

WAITING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that are marked and not sharded yet."""
SHARDED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that are sharded."""


def realize(module: nn.Module) -> None:
    """Shard the model that `module` is in, with the marked modules inside it as units."""
    root = _root_of(module)
    marked: dict[str, Any] = {name: inner for name, inner in root.named_modules() if isinstance(inner, FSDPModule)}
    setup = requested_setup(root, {name: inner._mark.arguments for name, inner in marked.items()})
    for inner in marked.values():  # first: the engine looks for `_terrazzo`, which would else come back to here
        inner._mark.root = weakref.ref(root)
    try:
        setup.shard(root, None)
    except BaseException:
        for inner in marked.values():
            inner._mark.root = None
        raise
    SHARDED.add(root)
    _complete(root, max(inner._mark.ahead for inner in marked.values()))
    for inner in marked.values():
        WAITING.discard(inner)
        _cast_at_borders(inner, inner._mark.arguments["mp_policy"])
    on_unattached_step(_before_any_step)


def _complete(root: Any, ahead: int) -> None:
    """What a sharded model of `fully_shard` has beside what every one has."""
    kind, engine, rows = type(root), engine_of(root), rows_of(root)
    root.__class__ = type(kind.__name__, (FSDPRoot, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    place(root.parameters(), root._mark.arguments["mesh"])
    reference = weakref.ref(root)

    def attached(optimizer: Optimizer) -> None:
        if (model := reference()) is not None:
            take_over(optimizer, model, rows)

    engine.drivers.on_added(attached)
    if ahead:
        units.gather_ahead(engine, ahead)


def rows_of(module: Any) -> RowPlacements:
    """How tensors of the model around a module are shown: on its mesh, by default one axis of all ranks."""
    root: Any = module._mark.root() if module._mark.root is not None else _root_of(module)
    if "_rows" not in root.__dict__:
        own = root._mark.arguments
        mesh = own["mesh"] or init_device_mesh(device_of(None).type, (dist.get_world_size(),))
        root.__dict__["_rows"] = RowPlacements(mesh)
    rows: RowPlacements = root.__dict__["_rows"]
    return rows


def _root_of(module: nn.Module) -> nn.Module:
    """The outermost marked module around `module`."""
    tops = _outermost(list(WAITING))
    return next(top for top in tops if any(inner is module for inner in top.modules()))


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that are inside none of the others."""
    candidates = list(modules)
    inside = {inner for module in candidates for inner in module.modules() if inner is not module}
    return [module for module in candidates if module not in inside]


def _cast_at_borders(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Cast floating inputs and outputs of a marked module, as torch does for each of them."""
    if policy.param_dtype is not None:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: _cast((args, kwargs), policy.param_dtype), with_kwargs=True
        )
    if policy.output_dtype is not None:
        module.register_forward_hook(lambda _, args, output: _cast(output, policy.output_dtype))


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, values)


def _before_any_step(optimizer: Optimizer) -> None:
    """Take over an optimizer that was built over the parameters of a sharded model, in its first step."""
    if not SHARDED:
        return
    stepped = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    if any(parameter.is_meta and parameter.grad is None for parameter in stepped.values()):
        raise Misuse(
            f"This {type(optimizer).__name__} was built over parameters on the meta device, which have been replaced "
            "since. Build it after model.to_empty(...), or after the model has run."
        )
    for root in list(SHARDED):
        own = {id(parameter) for parameter in root.parameters()} & stepped.keys()
        if own and len(own) < len(stepped):
            raise Misuse(
                f"This {type(optimizer).__name__} steps {len(stepped)} parameters, and {len(own)} of them are those of "
                f"a {type(root).__name__} that fully_shard was called on. Call fully_shard(model) on the whole model, "
                "last, and give each model an optimizer of its own."
            )
        if own:
            attach(root, optimizer)
