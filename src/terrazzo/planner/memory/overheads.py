"""What lies around a rank's tensors: the allocator's reserve, the device's context, communicators; and a bound."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.messages import GIB
from terrazzo.planner.figures import SPARE, Formula, Term
from terrazzo.planner.memory.states import STATE_OF
from terrazzo.planner.setup.setup import Setup

__all__ = [
    "FORMULAS",
    "MOVING_UPPER",
    "RESTING_RESERVE",
    "device_bytes",
    "process_term",
    "reserved_bytes",
    "upper_bytes",
    "upper_share",
    "workspace_bytes",
]

WORKSPACE_BYTES = 2 * 32 * 2**20
"""cuBLAS takes 32 MiB for each thread that multiplies, forward's and backward's (pytorch aten/src/ATen/cuda/
CublasHandlePool.cpp). Megatron's published steady states exceed their tensors by 70 to 80 MB."""

RESTING_RESERVE = 0.02
"""Share that the caching allocator adds to the bytes of states: they come first and stay, so that they are rounded up,
and leave no gaps."""

RESERVE, ROOMY_RESERVE, MOVING_UPPER = 0.06, 0.15, 0.35
"""Shares that it keeps beside all other terms, for rounding and fragmentation. It gives blocks back only when memory
runs out, so more where there is room. The first two are from benchmarks/results/allocator, which `python -m
benchmarks.allocator` makes, over all rows of the table, with the expandable segments that `terrazzo train` asks for:
without room the most on the smallest device, and with room the median. A bound adds what is kept where sequences vary
and segments are fixed, as in others' scripts; published are 30 % of the 25 GiB beside the states of one of eight ranks
of an 8B model (pytorch/torchtitan#929)."""

CONTEXT_BYTES, CONTEXT_BYTES_UPPER = 0.5 * GIB, 1.8 * GIB
"""Bytes of a CUDA context with its kernels: 0.47 GiB on A100 under torch 2.1, which loads kernels as they are used,
0.92 loading all, 1.78 under torch 1.10 (stas00/ml-engineering, training/performance)."""

PROCESS_BYTES, PROCESS_BYTES_UPPER = 0.33 * GIB, 0.5 * GIB
"""Bytes of a rank's own process, which takes the CPU's memory too: what is resident of Python, torch and Terrazzo after
a first step of nothing (`train/session/warm_kernels.py`, torch 2.13), and with transformers and a model of theirs. Of
a rank on a GPU, whose driver maps more, it is the least."""

COMMUNICATOR_BYTES, COMMUNICATOR_BYTES_UPPER = 0.6 * GIB, 1.9 * GIB
"""Bytes that NCCL takes for each communicator: 544 MB between two A100 and 688 between more (NVIDIA/nccl#964); reported
at most are 1.6 GB for one and 6 GB for three (NVIDIA/nccl#864), and 1.45 GiB after a first barrier
(stas00/ml-engineering)."""

FORMULAS = {
    "memory.workspace": Formula(
        f"two cuBLAS workspaces of {WORKSPACE_BYTES / 2**21:g} MiB, one of forward's and one of backward's thread",
        "pytorch aten/src/ATen/cuda/CublasHandlePool.cpp",
    ),
    "memory.reserved": Formula(
        f"states x {1 + RESTING_RESERVE:g}, and all other terms x {1 + ROOMY_RESERVE:g} as far as the device has room, "
        f"x {1 + RESERVE:g} where it has not: rounding and fragmentation of the caching allocator, which gives blocks "
        "back only when memory runs out",
        "python -m benchmarks.allocator",
    ),
    "memory.device": Formula(
        f"reserved bytes, {CONTEXT_BYTES / GIB:g} GiB for the CUDA context, and {COMMUNICATOR_BYTES / GIB:g} GiB for "
        f"the default group and each mesh axis; on a CPU {PROCESS_BYTES / GIB:g} GiB for the process and its "
        "libraries, and states that are offloaded to the same memory",
        "stas00/ml-engineering; NVIDIA/nccl#964; terrazzo/train/session/warm_kernels.py",
    ),
    "memory.process": Formula(
        f"{PROCESS_BYTES / GIB:g} GiB, at most {PROCESS_BYTES_UPPER / GIB:g}, of the host's memory for a rank's own "
        "process and its libraries; what its GPU's driver maps there comes on top",
        "terrazzo/train/session/warm_kernels.py",
    ),
    "memory.upper": Formula(
        f"upper values of states x {1 + RESTING_RESERVE:g}, and of all other terms x {1 + MOVING_UPPER:g}, for what "
        "the allocator keeps, at the moment at which these are most, which need not be the one that is expected to be "
        f"the fullest; {CONTEXT_BYTES_UPPER / GIB:g} GiB for the CUDA context, "
        f"{COMMUNICATOR_BYTES_UPPER / GIB:g} GiB for the default group and each mesh axis; on a CPU "
        f"{PROCESS_BYTES_UPPER / GIB:g} GiB for the process, states that are offloaded to the same memory, and what "
        "malloc keeps of gradients and weights that a step has freed before its fullest moment, or up to 2 GiB of all "
        "of them in the heap of a thread that does not take them then; to fit surely is to leave "
        f"{100 * SPARE:g} % of the device's memory, and of its host's where states are kept there",
        "python -m benchmarks.allocator; terrazzo/engine/runtime/pages.py; pytorch/torchtitan#929; NVIDIA/nccl#864; "
        "stas00/ml-engineering",
    ),
}


def process_term(setup: Setup) -> Term | None:
    """What a rank's own process takes of its host's memory beside the device's; None where these are one memory."""
    if setup.model.bare or setup.cluster.device.kind == "cpu":
        return None
    return Term("process", PROCESS_BYTES, PROCESS_BYTES_UPPER, "memory.process")


def workspace_bytes(setup: Setup) -> int:
    """What libraries take through torch's allocator."""
    return WORKSPACE_BYTES if _on_cuda(setup) else 0


def reserved_bytes(setup: Setup, terms: Sequence[Term]) -> float:
    """What the caching allocator holds at most, of what tensors take by `terms`; on CPU there is none."""
    return device_bytes(setup, terms) - _around(setup)


def device_bytes(setup: Setup, terms: Sequence[Term]) -> float:
    """What the device holds in all; more than its memory only if nothing that the allocator gives back helps."""
    around, capacity = _around(setup), setup.cluster.device.memory_bytes
    if not _on_cuda(setup):
        return sum(term.value for term in terms) + around
    least, roomy = (
        sum(term.value * _with_reserve(term.name, share) for term in terms) + around
        for share in (RESERVE, ROOMY_RESERVE)
    )
    return roomy if capacity is None else max(least, min(roomy, capacity))


def upper_bytes(setup: Setup, terms: Sequence[Term], moving: float = 0.0) -> float:
    """A bound for what a device must have, whatever this one has, from the upper values of terms.

    Args:
        moving: what all other terms may take together at any moment, with what the allocator keeps (`upper_share`).
    """
    if setup.model.bare:
        return sum(term.upper for term in terms)
    return sum(term.upper * upper_share(term.name) for term in terms) + moving + _around(setup, upper=True)


def upper_share(name: str) -> float:
    """How many times its bytes the allocator holds at most for the term of that name."""
    return _with_reserve(name, MOVING_UPPER)


def _with_reserve(name: str, moving_share: float) -> float:
    return 1 + (RESTING_RESERVE if name in STATE_OF else moving_share)


def _around(setup: Setup, upper: bool = False) -> float:
    """Bytes that no tensor takes: on a GPU the context and the communicators, on a CPU the process."""
    if setup.model.bare:
        return 0.0
    if not _on_cuda(setup):
        return PROCESS_BYTES_UPPER if upper else PROCESS_BYTES
    context, communicator = (
        (CONTEXT_BYTES_UPPER, COMMUNICATOR_BYTES_UPPER) if upper else (CONTEXT_BYTES, COMMUNICATOR_BYTES)
    )
    return context + _communicators(setup) * communicator


def _on_cuda(setup: Setup) -> bool:
    """Whether torch's CUDA allocator and libraries count; bare numbers of parameters are states and nothing else."""
    return setup.cluster.device.kind == "cuda" and not setup.model.bare


def _communicators(setup: Setup) -> int:
    """Mesh axes with ranks to talk to, and the default group."""
    mesh = setup.mesh
    if mesh.world_size == 1:
        return 0
    return 1 + sum(size > 1 for size in (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, mesh.ep))
