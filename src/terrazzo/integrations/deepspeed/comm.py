"""`deepspeed.comm`: torch.distributed, and the start of it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput

__all__ = ["init_distributed"]

_LAUNCHERS = (
    {"RANK": "OMPI_COMM_WORLD_RANK", "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE"},
    {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"},
)


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

    Each rank takes its GPU, if there are any. torchrun's variables count first, then those of MPI and Slurm, these only
    with `auto_mpi_discovery`.

    Raises:
        BadInput: MPI or Slurm has started several ranks, and none knows the first one's address.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    alone = {"RANK": str(max(rank, 0)), "LOCAL_RANK": "0", "WORLD_SIZE": str(max(world_size, 1))}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(distributed_port)}
    for name, value in {**alone, **(_launched() if auto_mpi_discovery else {}), **address}.items():
        os.environ.setdefault(name, value)
    if devices.count():
        devices.set_current(torch.device("cuda", int(os.environ["LOCAL_RANK"])))
        backend = devices.backend_for("cuda") if dist_backend in (None, "nccl") else dist_backend
    else:
        backend = "gloo" if dist_backend in (None, "nccl", "ccl") else dist_backend
    dist.init_process_group(backend, init_method=init_method, timeout=timeout)


def _launched() -> dict[str, str]:
    """The variables that torchrun sets, from those of another launcher; empty without one, or with torchrun."""
    for names in _LAUNCHERS if "RANK" not in os.environ else ():
        variables = {ours: os.environ.get(theirs, "") for ours, theirs in names.items()}
        if all(variables.values()) and int(variables["WORLD_SIZE"]) > 1:
            if "MASTER_ADDR" not in os.environ:
                raise BadInput(
                    f"{names['WORLD_SIZE']} says {variables['WORLD_SIZE']} ranks, but not where the first one is: set "
                    "MASTER_ADDR to its host and MASTER_PORT to a free port, or start the ranks by torchrun."
                )
            return variables
    return {}


def __getattr__(name: str) -> Any:
    """Everything else is torch.distributed's."""
    return getattr(dist, name)
