"""What the calls of `fully_shard` for one model ask of the engine, and what of it is refused."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from terrazzo.dialects.core.dialect import ReadingContext
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput
from terrazzo.integrations.shared.arguments import TerrazzoArguments
from terrazzo.integrations.shared.engine_setup import EngineSetup, trained_dtype
from terrazzo.integrations.shared.first_rank import warn_once
from terrazzo.integrations.shared.from_description import setup_for
from terrazzo.integrations.shared.honour import honour

__all__ = ["device_of", "requested_setup"]

_RESHARD = "reshard_after_forward"


def requested_setup(root: nn.Module, calls: Mapping[str, Mapping[str, Any]]) -> EngineSetup:
    """What the calls for a model ask of the engine, read as the fsdp2 dialect reads a file.

    Args:
        calls: the arguments of each call, by the name of its module; the model's own is empty.

    Raises:
        BadInput: what cannot be honoured of them, or calls that contradict each other.
    """
    own, inner = calls[""], {name: call for name, call in calls.items() if name}
    for name, call in calls.items():
        _check_same(name, call, own)
        _check_placements(root.get_submodule(name), call["shard_placement_fn"])
    document = _document(own, _reshard([call["reshard_after_forward"] for call in inner.values()] or [own[_RESHARD]]))
    loaded = trained_dtype(root)
    world = dist.get_world_size() if dist.is_initialized() else None
    description = honour("fsdp2", document, ReadingContext(world=world, load_dtype=str(loaded)), "fully_shard")
    units = TerrazzoArguments(units=tuple(map(glob.escape, inner)))
    return setup_for(description, device_of(own["mesh"]), loaded, own=("precision.output",)).overridden_by(units)


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


def device_of(mesh: DeviceMesh | None) -> torch.device:
    """The device of the ranks of a mesh; None: of the process group."""
    if mesh is not None:
        return torch.device(mesh.device_type)
    return torch.device(devices.kind_of_group())


# -- refused -------------------------------------------------------------------------------------------------------


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
        warn_once(
            f"fully_shard: shard_placement_fn chooses dim {chosen_dims} for some parameters, which has no effect: "
            "parameters lie in flat memory"
        )


def _reshard(choices: list[bool | int | None]) -> bool | int | None:
    """One choice for all units; where there are several, None means True."""
    chosen = [True if each is None and len(choices) > 1 else each for each in choices]
    if len({(type(each), each) for each in chosen}) == 1:  # 1 is a number of ranks, and equals True
        return chosen[0]
    if not all(isinstance(each, bool) for each in chosen):
        raise BadInput(f"fully_shard: {_RESHARD} is {', '.join(map(str, choices))}: give all units the same.")
    warn_once(
        f"fully_shard: {_RESHARD} is False for some units only: all are freed after forward. That changes memory and "
        "traffic, and no number."
    )
    return True
