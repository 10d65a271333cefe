"""What this machine has for ranks: the kind of device, how many ranks there may be, and threads for each."""

from __future__ import annotations

import torch

from terrazzo.config import Config, LaunchConfig
from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime import topology
from terrazzo.errors import BadInput
from terrazzo.launch.environment import told_threads

__all__ = ["cuda_index", "ranks_here", "ranks_to_start", "resolve_device", "set_threads"]


def ranks_here(world_size: int) -> int:
    """Ranks on this machine: all of the run, as long as none has been started."""
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


def cuda_index(local_rank: int) -> int:
    """The number of the CUDA device of this machine's rank `local_rank`. A single one is every rank's: Slurm may show
    each task only its own.

    Raises:
        BadInput: others have started more ranks than there are devices.
    """
    count = devices.count()
    if count > 1 and local_rank >= count:
        raise BadInput(
            f"Rank {local_rank} of this machine was started, but this machine has {count} CUDA devices and each rank"
            f" needs its own: start {count} ranks on it (torchrun --nproc-per-node {count}), or use launch.device=cpu."
        )
    return local_rank % count


def set_threads(config: LaunchConfig, ranks: int) -> None:
    """Set this process's threads: `launch.threads`, else those of `OMP_NUM_THREADS`, else its share of the CPUs.

    The share is that of one of `ranks` in what the machine or container allows.
    """
    torch.set_num_threads(config.threads or told_threads() or topology.cpus_of_a_rank(ranks))


def ranks_to_start(config: Config) -> int:
    """How many ranks this command starts; raises `BadInput` for more CUDA ranks than devices."""
    count = devices.count() if resolve_device(config.launch) == "cuda" else None
    if not (numbers := config.rank_numbers):
        return count or 1
    fitting = [number for number in numbers if count is None or number <= count]
    if not fitting:
        raise BadInput(
            f"launch.ranks is {config.launch.ranks}, but this machine has {count} CUDA devices and each rank needs its"
            f" own: use launch.ranks={count}, or launch.device=cpu."
        )
    return fitting[-1]
