"""This process on its machine: its number there, the ranks beside it, its kind of device and its threads."""

from __future__ import annotations

import os

import torch

from terrazzo.config import LaunchConfig
from terrazzo.engine.offload import topology
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput

__all__ = [
    "RUN_ID",
    "local_rank",
    "ranks_here",
    "require_environment",
    "resolve_device",
    "set_threads",
    "starter",
]

RUN_ID = "terrazzo"
"""By which what this package has started is known from what torchrun has started."""

_TOLD = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def require_environment() -> None:
    """Raise `BadInput` for a rank that was not told all of where it is: each would take the first GPU, and all CPUs."""
    if missing := [name for name in _TOLD if not os.environ.get(name)]:
        raise BadInput(
            f"RANK and WORLD_SIZE are set, and {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not. Start"
            " ranks with torchrun or srun, which tell each where it is; or set LOCAL_RANK, which counts the ranks of a"
            " machine from 0, LOCAL_WORLD_SIZE, which is how many these are, and MASTER_ADDR and MASTER_PORT, where"
            " rank 0 can be reached."
        )


def starter() -> str:
    """Who has started this rank, by what it has left in the environment."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is not None:
        return "`terrazzo run`" if run == RUN_ID else "torchrun"
    return "Slurm" if "SLURM_PROCID" in os.environ else "whoever set RANK"


def local_rank() -> int:
    """The number of this rank among those of its machine."""
    return int(os.environ["LOCAL_RANK"])


def ranks_here(world_size: int) -> int:
    """Ranks that share this machine: all, as long as none has been started."""
    return topology.ranks_here(otherwise=world_size)


def resolve_device(config: LaunchConfig) -> str:
    """`cpu` or `cuda`; raises `BadInput` when CUDA is asked for and there is none."""
    if config.device == "cuda" and not devices.count():
        raise BadInput(
            "launch.device is 'cuda', but torch sees no CUDA device: use launch.device=cpu, or install a torch build"
            " with CUDA and check that `nvidia-smi` lists a GPU."
        )
    if config.device == "auto":
        return "cuda" if devices.count() else "cpu"
    return config.device


def set_threads(config: LaunchConfig, ranks: int) -> None:
    """Give this rank, one of `ranks` here, its share of the CPUs that the machine, or the container, lets them have."""
    torch.set_num_threads(config.threads or topology.cpus_of_a_rank(ranks))
