"""The mesh of ranks by the names of its axes."""

from __future__ import annotations

import math
import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.engine import named_mesh
from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.mesh.family import STAGE_AXIS
from terrazzo.engine.runtime.device import kind_of_group
from terrazzo.errors import BadInput, Misuse
from terrazzo.given_numbers import is_count

__all__ = ["axes_of", "axis_of", "mesh", "mesh_sizes"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the outermost to the innermost: neighbouring ranks, which the fastest links join, are those of `tp`. Stages send
the least."""


def mesh(  # structure: signature fixed by the axes that there are
    *,
    pp: int | None = None,
    tp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    device: str | None = None,
) -> DeviceMesh:
    """All ranks of the process group, arranged by axes. Collective.

    Args:
        pp: ranks that have stages of the model (pipeline parallel); left out, the mesh has no such axis.
        tp: ranks that have a part of each matrix (tensor parallel); left out, the mesh has no such axis.
        cp: ranks that have a part of each sequence (context parallel); left out, the mesh has no such axis.
        ep: neighbouring ranks that have other experts of the same layers (expert parallel). It takes no ranks from the
            other axes: it is cut out of those that `dp_shard`, `cp` and `tp` have together.
        dp_replicate: groups that hold copies of each other under plans such as `hybrid_shard`.
        dp_shard: ranks over which states are split; by default what the other axes leave.
        device: kind of device; by default that of the process group.

    Returns:
        A mesh with the axes given and `dp_shard`; the same object for the same axes, as long as the group is the same.

    Raises:
        BadInput: sizes whose product is not the number of ranks.
        Misuse: without a process group.
    """
    if not dist.is_initialized():
        raise Misuse("tz.mesh needs torch.distributed. Call torch.distributed.init_process_group() first.")
    sizes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp, "ep": ep}
    return named_mesh(device or kind_of_group(), mesh_sizes(sizes, dist.get_world_size()))


def mesh_sizes(wanted: dict[str, int | None], world_size: int) -> dict[str, int]:
    """The sizes of the axes given and of `dp_shard`, outermost first, and of `ep` where it is more than 1.

    Args:
        wanted: by axis; None where the mesh is to have no such axis, and `dp_shard` what the others leave.

    Raises:
        BadInput: sizes that are no positive integers, or whose product is not `world_size`; an `ep` that does not
            divide the ranks of one replica of a stage, `dp_shard` × `cp` × `tp`.
    """
    sizes = {axis: size for axis in (*AXES, "ep") if (size := wanted.get(axis)) is not None}
    for axis, size in sizes.items():
        if not is_count(size):
            raise BadInput(f"The mesh axis {axis} is {size!r}; it counts ranks: give an int, 1 or more.")
    experts = sizes.pop("ep", 1)
    others = math.prod(size for axis, size in sizes.items() if axis != "dp_shard")
    if world_size % others or sizes.get("dp_shard", world_size // others) * others != world_size:
        product = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        run = "1 rank" if world_size == 1 else f"{world_size} ranks"
        started = math.prod(sizes.values())
        given = "Leave dp_shard out, which takes what the others leave, and c" if "dp_shard" in sizes else "C"
        raise BadInput(
            f"The mesh {product} does not make up the {run} of this run: the product of its axes must be "
            f"{world_size}. {given}hoose others whose product divides {world_size}; or start {started} ranks "
            f"(launch.ranks={started}, terrazzo run --ranks {started})."
        )
    all_sizes = {axis: sizes.get(axis, world_size // others) for axis in AXES if axis in sizes or axis == "dp_shard"}
    group = world_size // (all_sizes.get(STAGE_AXIS, 1) * all_sizes.get("dp_replicate", 1))
    if group % experts:
        shared = " × ".join(
            f"{axis} {size}" for axis, size in all_sizes.items() if axis not in (STAGE_AXIS, "dp_replicate")
        )
        raise BadInput(
            f"The mesh has ep {experts}, which does not divide the {group} ranks that dp_shard, cp and tp have together"
            f" ({shared}): as many must share experts everywhere. Choose ep so that it divides {group}."
        )
    return all_sizes if experts == 1 else {**all_sizes, "ep": experts}


def axes_of(mesh: DeviceMesh) -> Axes:
    """All axes of a mesh, with connections that all models on it share. Collective the first time."""
    return _once_for(mesh, None)


def axis_of(mesh: DeviceMesh, axis: str) -> tuple[Axes, Collectives]:
    """One axis of a mesh alone, and the collectives along it, whose connections all models on the mesh share.

    Collective the first time.
    """
    axes = _once_for(mesh, axis)
    return axes, axes.along(axes.within_stage[0])


def _once_for(mesh: DeviceMesh, axis: str | None) -> Axes:
    key = id(mesh), axis  # meshes of earlier process groups may be equal to it
    if key not in _BUILT:
        _BUILT[key] = Axes(mesh if axis is None else mesh[axis], Tally(), shared=True)
        weakref.finalize(mesh, _BUILT.pop, key, None)
    return _BUILT[key]


_BUILT: dict[tuple[int, str | None], Axes] = {}
