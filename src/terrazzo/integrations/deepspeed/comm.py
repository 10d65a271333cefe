"""`deepspeed.comm`: torch.distributed, and the start of it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput
from terrazzo.launch.environment import adopt_slurm

__all__ = ["init_distributed"]

_OF_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
}


def init_distributed(  # structure: signature fixed by DeepSpeed
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed if it is not running; a process without a launcher is one rank.

    Each rank takes its GPU, if there are any. `rank` and `world_size` count first, then torchrun's variables, then
    those of MPI and of Slurm's steps, these only with `auto_mpi_discovery`.

    Raises:
        BadInput: MPI has started several ranks, and none knows the first one's address.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    if auto_mpi_discovery:
        _adopt_mpi()
        adopt_slurm()
    alone = {"RANK": str(max(rank, 0)), "LOCAL_RANK": "0", "WORLD_SIZE": str(max(world_size, 1))}
    for name, value in {**alone, "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    rank = rank if rank >= 0 else int(os.environ["RANK"])
    world_size = world_size if world_size >= 0 else int(os.environ["WORLD_SIZE"])
    if devices.count():
        devices.set_current(torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        backend = devices.backend_for("cuda") if dist_backend in (None, "nccl") else dist_backend
    else:
        backend = "gloo" if dist_backend in (None, "nccl", "ccl") else dist_backend
    dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)


def _adopt_mpi() -> None:
    """Inside one of several processes of MPI, set the variables that torchrun would have set, as `adopt_slurm` does."""
    variables = {ours: os.environ.get(theirs, "") for ours, theirs in _OF_MPI.items()}
    if "RANK" in os.environ or not all(variables.values()) or int(variables["WORLD_SIZE"]) == 1:
        return
    if "MASTER_ADDR" not in os.environ:
        raise BadInput(
            f"{_OF_MPI['WORLD_SIZE']} says {variables['WORLD_SIZE']} ranks, but not where the first one is: set "
            "MASTER_ADDR to its host and MASTER_PORT to a free port, or start the ranks by torchrun."
        )
    os.environ.update(variables)


def __getattr__(name: str) -> Any:
    """Everything else is torch.distributed's."""
    return getattr(dist, name)
