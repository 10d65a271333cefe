"""What lies around a rank's tensors: the allocator's reserve, the device's context, communicators; and a bound."""

from __future__ import annotations

from terrazzo.files import GIB
from terrazzo.planner.formulas import Formula
from terrazzo.planner.setup.setup import Setup

__all__ = ["FORMULAS", "device_bytes", "reserved_bytes", "upper_bytes", "workspace_bytes"]

WORKSPACE_BYTES = 2 * 32 * 2**20
"""cuBLAS takes 32 MiB for each thread that multiplies, forward's and backward's (pytorch aten/src/ATen/cuda/
CublasHandlePool.cpp). Megatron's published steady states exceed their tensors by 70 to 80 MB."""

RESERVE, RESERVE_UPPER = 0.05, 0.12
ROOMY_RESERVE = 0.12
"""Of allocated bytes, that the caching allocator keeps besides: rounding and fragmentation. It gives blocks back only
when memory runs out, so more where there is room. From benchmarks/results/allocator, which
`python -m benchmarks.allocator` makes, over all rows of the table, with the expandable segments that `terrazzo train`
asks for: the median with room, and without, the most on the smallest device; 1.07 times is the most without them.
Published runs, with room, kept 19% more than the 40.2 GiB that were active (pytorch/torchtitan#929), 37% more than
60 GB (pytorch/pytorch#147179): what is kept so says nothing about what is needed, and the bound is of that."""

CONTEXT_BYTES, CONTEXT_BYTES_UPPER = 0.5 * GIB, 1.0 * GIB
"""Of a CUDA context with its kernels: 0.47 to 1.8 GiB over generations (stas00/ml-engineering)."""

PROCESS_BYTES, PROCESS_BYTES_UPPER = 0.33 * GIB, 0.5 * GIB
"""On a CPU, which has its ranks' interpreters too: what is resident of Python, torch and Terrazzo after a first step of
nothing (`train/first_use.py`, torch 2.13), and with transformers and a model of theirs."""

COMMUNICATOR_BYTES, COMMUNICATOR_BYTES_UPPER = 0.25 * GIB, 0.5 * GIB
"""Of NCCL for each mesh axis: torch.distributed with NCCL takes 1 to 2 GiB in all (stas00/ml-engineering)."""

FORMULAS = {
    "memory.workspace": Formula(
        "two cuBLAS workspaces of 32 MiB, one of forward's and one of backward's thread",
        "pytorch aten/src/ATen/cuda/CublasHandlePool.cpp",
    ),
    "memory.reserved": Formula(
        "allocated bytes x 1.12 as far as the device has room, x 1.05 where it has not: rounding and fragmentation of "
        "the caching allocator, which gives blocks back only when memory runs out",
        "python -m benchmarks.allocator",
    ),
    "memory.device": Formula(
        "reserved bytes, 0.5 GiB for the CUDA context, and 0.25 GiB for the default group and each mesh axis; on a CPU "
        "0.33 GiB for the process and its libraries",
        "stas00/ml-engineering; terrazzo/train/first_use.py",
    ),
    "memory.upper": Formula(
        "upper values of all terms x 1.12, for what the allocator cannot give back, 1 GiB for the CUDA context, 0.5 "
        "GiB for the default group and each mesh axis; on a CPU 0.5 GiB for the process; to fit surely is to leave 2 % "
        "of the device's memory",
        "python -m benchmarks.allocator; stas00/ml-engineering",
    ),
}


def workspace_bytes(setup: Setup) -> int:
    """What libraries take through torch's allocator."""
    return WORKSPACE_BYTES if _on_cuda(setup) else 0


def reserved_bytes(setup: Setup, allocated: float) -> float:
    """What the caching allocator holds when tensors hold `allocated` at most; on CPU there is none."""
    return device_bytes(setup, allocated) - _around(setup)


def device_bytes(setup: Setup, allocated: float) -> float:
    """What the device holds in all; more than its memory only if nothing that the allocator gives back helps."""
    around, capacity = _around(setup), setup.cluster.device.memory_bytes
    if not _on_cuda(setup):
        return allocated + around
    pressed, roomy = allocated * (1 + RESERVE) + around, allocated * (1 + ROOMY_RESERVE) + around
    return roomy if capacity is None else max(pressed, min(roomy, capacity))


def upper_bytes(setup: Setup, allocated_upper: float) -> float:
    """A bound for what a device must have, from the upper values of the terms, whatever this one has."""
    if setup.model.bare:
        return allocated_upper
    return allocated_upper * (1 + RESERVE_UPPER) + _around(setup, upper=True)


def _around(setup: Setup, upper: bool = False) -> float:
    """Of what is no tensor's: on a GPU the context and the communicators, on a CPU the process."""
    if setup.model.bare:
        return 0.0
    if not _on_cuda(setup):
        return PROCESS_BYTES_UPPER if upper else PROCESS_BYTES
    context, communicator = (
        (CONTEXT_BYTES_UPPER, COMMUNICATOR_BYTES_UPPER) if upper else (CONTEXT_BYTES, COMMUNICATOR_BYTES)
    )
    return context + _communicators(setup) * communicator


def _on_cuda(setup: Setup) -> bool:
    """Bare numbers of parameters are states and nothing else."""
    return setup.cluster.device.kind == "cuda" and not setup.model.bare


def _communicators(setup: Setup) -> int:
    """Mesh axes with ranks to talk to, and the default group."""
    mesh = setup.mesh
    if mesh.world_size == 1:
        return 0
    return 1 + sum(size > 1 for size in (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, mesh.ep))
