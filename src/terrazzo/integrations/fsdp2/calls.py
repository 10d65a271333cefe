"""Marks modules as `fully_shard` is called on them, and shards a model when it is first run or asked for its engine.

Only then is it known which module is the root. The optimizer, which is built later, is taken over in its first step.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.dialects.registry import dialect
from terrazzo.dialects.verbs.understand import read_document
from terrazzo.engine import attach, engine_of, on_unattached_step
from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.private_torch import tree_map_only
from terrazzo.errors import BadInput, Misuse
from terrazzo.integrations.fsdp2 import units
from terrazzo.integrations.fsdp2.module import FSDPModule, FSDPRoot, ModuleMark
from terrazzo.integrations.fsdp2.optimizer import take_over
from terrazzo.integrations.fsdp2.states import RowPlacements, place
from terrazzo.integrations.shared.engine_setup import EngineSetup, trained_dtypes
from terrazzo.integrations.shared.from_description import setup_for
from terrazzo.integrations.shared.honour import honour

__all__ = ["fully_shard"]

T = TypeVar("T")

_WAITING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that are marked and not sharded yet."""
_SHARDED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that are sharded."""


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
    if any(inner is module for model in _SHARDED for inner in model.modules()):
        raise Misuse(
            f"fully_shard was called on a {type(module).__name__} inside a model that is sharded already. Call it on "
            "all modules, the model last, before anything else."
        )
    kind = type(module)
    names: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    if callable(own := getattr(kind, "generate", None)):
        names["generate"] = _once_sharded(own)
    module.__class__ = type(kind.__name__, (FSDPModule, kind), names)
    module.__dict__["_mark"] = ModuleMark(arguments, _realize, _rows)
    place(module.parameters(), arguments["mesh"])
    _WAITING.add(module)


def _once_sharded(own: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` of a model that nothing may have run yet: sharding puts one before it that keeps ranks together."""

    @functools.wraps(own)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._mark.root is not None:
            return own(self, *args, **kwargs)
        engine_of(self)
        return self.generate(*args, **kwargs)

    return generate


# -- sharding ------------------------------------------------------------------------------------------------------


def _realize(module: nn.Module) -> None:
    """Shard the model that `module` is in, with the marked modules inside it as units."""
    root = _root_of(module)
    marked: dict[str, Any] = {name: inner for name, inner in root.named_modules() if isinstance(inner, FSDPModule)}
    setup = _setup(root, {name: inner._mark.arguments for name, inner in marked.items()})
    for inner in marked.values():  # first: the engine looks for `_terrazzo`, which would else come back to here
        inner._mark.root = weakref.ref(root)
    try:
        setup.shard(root, None)
    except BaseException:
        for inner in marked.values():
            inner._mark.root = None
        raise
    _SHARDED.add(root)
    _complete(root, max(inner._mark.ahead for inner in marked.values()))
    for inner in marked.values():
        _WAITING.discard(inner)
        _cast_at_borders(inner, inner._mark.arguments["mp_policy"])
    on_unattached_step(_before_any_step)


def _complete(root: Any, ahead: int) -> None:
    """What a sharded model of `fully_shard` has beside what every one has."""
    kind, engine, rows = type(root), engine_of(root), _rows(root)
    root.__class__ = type(kind.__name__, (FSDPRoot, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    place(root.parameters(), root._mark.arguments["mesh"])
    reference = weakref.ref(root)

    def attached(optimizer: Optimizer) -> None:
        if (model := reference()) is not None:
            take_over(optimizer, model, rows)

    engine.drivers.on_added(attached)
    if ahead:
        units.gather_ahead(engine, ahead)


def _rows(module: Any) -> RowPlacements:
    """How tensors of the model around a module are shown: on its mesh, by default one axis of all ranks."""
    root: Any = module._mark.root() if module._mark.root is not None else _root_of(module)
    if "_rows" not in root.__dict__:
        own = root._mark.arguments
        mesh = own["mesh"] or init_device_mesh(_device(None).type, (dist.get_world_size(),))
        root.__dict__["_rows"] = RowPlacements(mesh)
    rows: RowPlacements = root.__dict__["_rows"]
    return rows


def _root_of(module: nn.Module) -> nn.Module:
    """The outermost marked module around `module`."""
    tops = _outermost(list(_WAITING))
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


def _setup(root: nn.Module, calls: Mapping[str, Mapping[str, Any]]) -> EngineSetup:
    """What the calls ask of the engine, read as the fsdp2 dialect reads a file."""
    own, inner = calls[""], {name: call for name, call in calls.items() if name}
    for name, call in calls.items():
        _check_same(name, call, own)
        _check_placements(root.get_submodule(name), call["shard_placement_fn"])
    document = _document(own, _reshard([call["reshard_after_forward"] for call in inner.values()] or [own[_RESHARD]]))
    loaded = _dtype_of(root)
    world = dist.get_world_size() if dist.is_initialized() else None
    reading = read_document(dialect("fsdp2"), document, ReadingContext(world=world, load_dtype=str(loaded)))
    setup = setup_for(honour(reading, "fully_shard"), _device(own["mesh"]), loaded)
    return dataclasses.replace(setup, units=tuple(map(glob.escape, inner)))


_RESHARD = "reshard_after_forward"


def _check_same(name: str, call: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for key in ("mesh", "mp_policy", "offload_policy", "dp_mesh_dims"):
        one, other = ((_dtypes(each[key]) if key == "mp_policy" else each[key]) for each in (call, own))
        if one != other:
            raise BadInput(
                f"fully_shard was called with {key} {one!r} for {name!r} and with {other!r} for the model; a model "
                "has one. Give every call the same."
            )
    if call["ignored_params"]:
        raise BadInput("fully_shard: ignored_params: Terrazzo shards every parameter of the model. Leave it out.")
    policy = call["mp_policy"]
    if policy.param_dtype is not None and not policy.cast_forward_inputs:
        raise BadInput("fully_shard: mp_policy: cast_forward_inputs=False: the model's inputs are always cast.")


def _dtypes(policy: MixedPrecisionPolicy) -> tuple[torch.dtype | None, ...]:
    """What must be the same in all calls; outputs may be cast as each module likes."""
    return policy.param_dtype, policy.reduce_dtype


def _check_placements(module: nn.Module, chosen: Callable[[nn.Parameter], Any] | None) -> None:
    if chosen is None:
        return
    placements = [chosen(parameter) for parameter in module.parameters()]
    if any(not isinstance(placement, Shard | None) for placement in placements):
        raise BadInput("fully_shard: shard_placement_fn names a mesh for some parameters; all share the model's mesh.")
    dims = {placement.dim for placement in placements if placement is not None} - {0}
    if dims:
        chosen_dims = ", ".join(map(str, sorted(dims)))
        warnings.warn(
            f"fully_shard: shard_placement_fn chooses dim {chosen_dims} for some parameters, which has no effect: "
            "parameters lie in flat memory",
            stacklevel=2,
        )


def _reshard(choices: list[bool | int | None]) -> bool | int | None:
    """One choice for all units; where there are several, None means True."""
    chosen = {True if each is None and len(choices) > 1 else each for each in choices}
    if len(chosen) == 1:
        return chosen.pop()
    if not chosen <= {True, False}:
        raise BadInput(f"fully_shard: {_RESHARD} is {', '.join(map(str, choices))}: give all units the same.")
    warnings.warn(
        f"fully_shard: {_RESHARD} is False for some units only: all are freed after forward. That changes memory and "
        "traffic, and no number.",
        stacklevel=2,
    )
    return True


def _document(own: Mapping[str, Any], reshard: bool | int | None) -> dict[str, Any]:
    """The arguments as plain data."""
    policy, offload, mesh, dims = own["mp_policy"], own["offload_policy"], own["mesh"], own["dp_mesh_dims"]
    dtypes = zip(("param_dtype", "reduce_dtype"), _dtypes(policy), strict=True)
    document: dict[str, Any] = {"mp_policy": {name: str(dtype) for name, dtype in dtypes if dtype is not None}}
    if reshard is not None:
        document["reshard_after_forward"] = reshard
    if isinstance(offload, CPUOffloadPolicy):
        document["offload_policy"] = {"pin_memory": offload.pin_memory}
    if mesh is not None:
        names = mesh.mesh_dim_names
        document["mesh"] = list(mesh.shape) if names is None else dict(zip(names, mesh.shape, strict=True))
    if dims is not None:
        document["dp_mesh_dims"] = {
            name: value for name, value in dataclasses.asdict(dims).items() if value is not None
        }
    return document


def _dtype_of(root: nn.Module) -> torch.dtype:
    dtypes = trained_dtypes(root)
    if len(dtypes) > 1:
        raise BadInput(
            f"fully_shard: trainable parameters are in {', '.join(map(str, dtypes))}: convert them to one dtype."
        )
    return dtypes[0]


def _device(mesh: DeviceMesh | None) -> torch.device:
    if mesh is not None:
        return torch.device(mesh.device_type)
    return torch.device(devices.kind_of_group())


def _before_any_step(optimizer: Optimizer) -> None:
    """Take over an optimizer that was built over the parameters of a sharded model, in its first step."""
    if not _SHARDED:
        return
    stepped = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    if any(parameter.is_meta and parameter.grad is None for parameter in stepped.values()):
        raise Misuse(
            f"This {type(optimizer).__name__} was built over parameters on the meta device, which have been replaced "
            "since. Build it after model.to_empty(...), or after the model has run."
        )
    for root in list(_SHARDED):
        own = {id(parameter) for parameter in root.parameters()} & stepped.keys()
        if own and len(own) < len(stepped):
            raise Misuse(
                f"This {type(optimizer).__name__} steps {len(stepped)} parameters, and {len(own)} of them are those of "
                f"a {type(root).__name__} that fully_shard was called on. Call fully_shard(model) on the whole model, "
                "last, and give each model an optimizer of its own."
            )
        if own:
            attach(root, optimizer)
