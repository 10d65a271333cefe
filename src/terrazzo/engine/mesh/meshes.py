"""Meshes of ranks: how one is made, and the process group of each of its axes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from terrazzo.engine.mesh.family import DATA_AXES, SAME_DATA_AXES, STAGE_AXIS
from terrazzo.marks import Mark

__all__ = ["data_mesh", "expert_mesh", "groups_of", "named_mesh"]


def data_mesh(kind: str, *sizes: int) -> DeviceMesh:
    """The mesh of all ranks on a `kind` of device, in sizes (ranks,) or (replicas, shards). Collective."""
    return named_mesh(kind, dict(zip(("dp_replicate", "dp_shard")[-len(sizes) :], sizes, strict=True)))


def named_mesh(kind: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """The mesh of all ranks on a `kind` of device, by axis, outermost first. Collective.

    Models share it, and its process groups, as long as the default group is the same.

    Args:
        sizes: of the axes; with `ep`, which is none of its own: neighbours among the ranks of one replica of a stage,
            `dp_shard` × `cp` × `tp`, share experts, whatever else they do.
    """
    known = _known_meshes(len(sizes) > 1) if dist.is_initialized() else {}
    key = (kind, *sizes.items())
    if (mesh := known.get(key)) is None:
        own = {axis: size for axis, size in sizes.items() if axis != "ep"}
        mesh = known[key] = init_device_mesh(kind, tuple(own.values()), mesh_dim_names=tuple(own))
        if sizes.get("ep", 1) > 1:
            apart = own.get(STAGE_AXIS, 1) * own.get("dp_replicate", 1)
            shape = (apart, math.prod(own.values()) // apart // sizes["ep"], sizes["ep"])
            _EXPERT_MESH.leave(mesh, init_device_mesh(kind, shape, mesh_dim_names=("apart", "edp", "ep")))
    return mesh


_Meshes = MutableMapping[tuple[Any, ...], DeviceMesh]
_MESHES: weakref.WeakKeyDictionary[Any, dict[bool, _Meshes]] = weakref.WeakKeyDictionary()


def _known_meshes(has_groups: bool) -> _Meshes:
    """Meshes of the default group, by kind of device and sizes.

    One of several axes has process groups of its own, which stay as long as the default group does. One of a single
    axis has that group itself, and would keep it: it is known as long as somebody has it.
    """
    known = _MESHES.setdefault(dist.group.WORLD, {False: weakref.WeakValueDictionary(), True: {}})
    return known[has_groups]


_EXPERT_MESH = Mark[DeviceMesh]("terrazzo_expert_mesh")


def expert_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh of the same ranks by `edp`, along which they have the same experts, and `ep`; None without such axes."""
    return _EXPERT_MESH.find(mesh)


def groups_of(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """The process group of each axis that is known, innermost first; that of `dp_shard` has the ranks of `cp` too."""
    dims, groups = mesh.mesh_dim_names or (), dict[str, dist.ProcessGroup]()
    inner = tuple(dim for dim in dims if dim in ("dp_shard", "cp"))
    for axis in (*SAME_DATA_AXES, *DATA_AXES, STAGE_AXIS):
        if axis == "dp_shard" and inner:
            groups[axis] = (mesh[inner]._flatten("_".join(inner)) if len(inner) > 1 else mesh[inner[0]]).get_group()
        elif axis in dims and axis not in inner:
            groups[axis] = mesh.get_group(axis)
    return groups
