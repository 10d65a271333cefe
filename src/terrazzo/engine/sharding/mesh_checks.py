"""Checks of the process group and the mesh: whether ranks can exchange, on devices and axes that are known."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.engine.comm.backends import backend_of
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.mesh.family import DATA_AXES, SAME_DATA_AXES, STAGE_AXIS
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput, Misuse

__all__ = ["check_group", "check_is_mesh", "check_kind", "check_mesh"]


def check_group() -> None:
    """Refuse to go on without a process group, through which ranks hear of each other's errors.

    Raises:
        Misuse: there.
    """
    if not dist.is_initialized():
        raise Misuse(
            "tz.shard needs torch.distributed. Call torch.distributed.init_process_group() first, in a script that "
            "'terrazzo run --ranks N script.py' or 'torchrun --nproc-per-node=N script.py' starts; N may be 1."
        )


def check_is_mesh(mesh: object) -> None:
    """Refuse what is no mesh. Ranks cannot hear of it, who have none.

    Raises:
        BadInput: there.
    """
    if not isinstance(mesh, DeviceMesh):
        raise BadInput(
            f"mesh is {mesh!r}; pass what tz.mesh or torch's init_device_mesh gives, or leave it out: all ranks are on "
            "one dp_shard axis then."
        )


def check_kind(kind: str) -> None:
    """Refuse a mesh on devices whose streams and pinned memory this version does not know.

    Raises:
        BadInput: there.
    """
    if kind not in devices.KINDS:
        raise BadInput(
            f"The mesh is on {kind!r}; this version runs on {' and '.join(devices.KINDS)}, AMD's GPUs being cuda to "
            "torch as well. Build the mesh with init_device_mesh('cpu', ...) to try a script there."
        )


def check_mesh(mesh: DeviceMesh, axes: Axes) -> None:
    """Refuse a mesh without data axes, with unknown axes, or with a backend that cannot serve it.

    Raises:
        BadInput: there.
    """
    dims = mesh.mesh_dim_names or ()
    if not axes.data or any(dim not in (*DATA_AXES, *SAME_DATA_AXES, STAGE_AXIS) for dim in dims):
        raise BadInput(
            f"The mesh has the axes {', '.join(dims) or 'without names'}; this version knows the data axes "
            "dp_replicate, dp_shard and cp, of which it needs one, tp and pp; ep is cut out of these. Make it with "
            "tz.mesh, or name them: "
            'mesh_dim_names=("dp_replicate", "dp_shard") of init_device_mesh.'
        )
    backend = backend_of(mesh.get_group(axes.data[0]), axes.device)
    if axes.device.type == "cuda" and backend == "gloo":
        raise BadInput(
            "The mesh is on CUDA, but the process group's backend for CUDA tensors is gloo. Initialise it with "
            'init_process_group("cpu:gloo,cuda:nccl").'
        )
    if axes.device.type == "cpu" and backend == "nccl":
        raise BadInput('The mesh is on the CPU, but the process group is NCCL. Use init_process_group("cpu:gloo").')
