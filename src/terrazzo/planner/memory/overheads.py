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
ROOMY_RESERVE, ROOMY_RESERVE_UPPER = 0.12, 0.25
"""Of allocated bytes, that the caching allocator keeps besides: rounding and fragmentation. It gives blocks back only
when memory runs out, so more where there is room. From benchmarks/results/allocator, which
`python -m benchmarks.allocator` makes, over all rows of the table, with the expandable segments that `terrazzo train`
asks for: the median with room, and without, the most on the smallest device.
The upper values are from published runs: 19% more than the 40.2 GiB that were active (pytorch/torchtitan#929), 37% more
than 60 GB (pytorch/pytorch#147179)."""

CONTEXT_BYTES, CONTEXT_BYTES_UPPER = 0.5 * GIB, 1.0 * GIB
"""Of a CUDA context with its kernels: 0.47 to 1.8 GiB over generations (stas00/ml-engineering)."""

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
        "reserved bytes, 0.5 GiB for the CUDA context, and 0.25 GiB for the default group and each mesh axis",
        "stas00/ml-engineering",
    ),
    "memory.upper": Formula(
        "upper values of all terms x 1.25 as far as the device has room, x 1.12 where it has not, 1 GiB for the CUDA "
        "context, 0.5 GiB for the default group and each mesh axis",
        "pytorch/torchtitan#929; pytorch/pytorch#147179; stas00/ml-engineering",
    ),
}


def workspace_bytes(setup: Setup) -> int:
    """What libraries take through torch's allocator."""
    return WORKSPACE_BYTES if _on_cuda(setup) else 0


def reserved_bytes(setup: Setup, allocated: float) -> float:
    """What the caching allocator holds when tensors hold `allocated` at most; on CPU there is none."""
    return device_bytes(setup, allocated) - _around(setup, CONTEXT_BYTES, COMMUNICATOR_BYTES)


def device_bytes(setup: Setup, allocated: float) -> float:
    """What the device holds in all; more than its memory only if nothing that the allocator gives back helps."""
    if not _on_cuda(setup):
        return allocated
    around = _around(setup, CONTEXT_BYTES, COMMUNICATOR_BYTES)
    return _within(setup, allocated * (1 + RESERVE) + around, allocated * (1 + ROOMY_RESERVE) + around)


def upper_bytes(setup: Setup, allocated_upper: float) -> float:
    """A bound for it, from the upper values of the terms."""
    if setup.model.bare:
        return allocated_upper
    if not _on_cuda(setup):
        return allocated_upper * (1 + RESERVE_UPPER)
    around = _around(setup, CONTEXT_BYTES_UPPER, COMMUNICATOR_BYTES_UPPER)
    pressed, roomy = allocated_upper * (1 + RESERVE_UPPER), allocated_upper * (1 + ROOMY_RESERVE_UPPER)
    return _within(setup, pressed + around, roomy + around)


def _within(setup: Setup, pressed: float, roomy: float) -> float:
    """What is held with room, but no more than there is; what is held without it, whether there is so much or not."""
    capacity = setup.cluster.device.memory_bytes
    return roomy if capacity is None else max(pressed, min(roomy, capacity))


def _around(setup: Setup, context_bytes: float, communicator_bytes: float) -> float:
    return context_bytes + _communicators(setup) * communicator_bytes if _on_cuda(setup) else 0.0


def _on_cuda(setup: Setup) -> bool:
    """Bare numbers of parameters are states and nothing else."""
    return setup.cluster.device.kind == "cuda" and not setup.model.bare


def _communicators(setup: Setup) -> int:
    """Mesh axes with ranks to talk to, and the default group."""
    mesh = setup.mesh
    if mesh.world_size == 1:
        return 0
    return 1 + sum(size > 1 for size in (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, mesh.ep))
