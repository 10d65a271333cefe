"""A CUDA device made of host memory, for torch's CPU wheel: tests of CUDA code that need no GPU.

    import hostcuda
    hostcuda.load()                     # before torch is imported
    from hostcuda.device import report, start
    start(home=rank, devices=world_size)
    ...                                 # torch.cuda, NCCL, FSDP2, as on a GPU
    assert not report.faults            # races, memory freed too early, foreign devices

See README.md for what is simulated and what is not. This module imports nothing of torch.
"""

from __future__ import annotations

from hostcuda.build import Unbuildable, obstacle
from hostcuda.library import native

__all__ = ["Unbuildable", "load", "obstacle"]


def load() -> None:
    """Make torch see a CUDA device from its import on. Processes forked afterwards have it too.

    Also changes `queue.SimpleQueue`: modules that ask for it by name have to be imported afterwards.

    Raises: `Unbuildable`; `RuntimeError` when torch has been imported before.
    """
    native.load()
    from hostcuda import collectives, surface, threads  # these import torch

    surface.install()
    collectives.install()
    threads.install()
