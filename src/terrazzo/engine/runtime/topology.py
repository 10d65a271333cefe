"""Which CPU cores a rank's optimizer step should run on, and how many threads.

An optimizer step on the CPU is bound by memory bandwidth, and what costs it speed is threads in the wrong place: on two
hardware threads of one core, on the socket that its memory is not attached to, in every rank as many as the host has
cores, or wandering from core to core. With DeepSpeed, binding ranks to cores of their own took a step of Qwen2.5-3B on
two A100 from 3084 to 2383 ms (deepspeedai/DeepSpeed, pull request 7474). So a rank gets the physical cores of its GPU's
NUMA node, divided by the local ranks that share them, one thread each. Bind before the thread's first parallel
region, because OpenMP's threads inherit the CPUs of the one that starts them.

Everything is read from below one folder, normally `/sys`, and from `proc` beside it; what is missing narrows nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from terrazzo.engine.runtime import device as devices
from terrazzo.processes.cpus import allowed_cpus
from terrazzo.processes.system import SYS, control_groups, text_of

__all__ = [
    "bind_to",
    "bound_to",
    "cpus_of_a_rank",
    "numa_nodes",
    "physical_cores",
    "ranks_here",
    "step_threads",
    "told_ranks_here",
]


def told_ranks_here() -> str:
    """How many ranks share this host, in the words of the launcher; empty if none has said it.

    torchrun's name for it is LOCAL_WORLD_SIZE, that of the deepspeed launcher LOCAL_SIZE.
    """
    return os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""


def ranks_here(otherwise: int) -> int:
    """How many ranks share this host, as a launcher tells each of them; `otherwise` if none has."""
    return int(told_ranks_here() or otherwise)


def step_threads(device: torch.device, local_ranks: int, root: Path = SYS) -> tuple[int, frozenset[int]]:
    """Threads for this rank's optimizer step on the CPU, and the CPUs to bind them to (none: do not bind).

    Args:
        device: of this rank. On a CPU its own threads are what it has, and bound as the user bound them.
        local_ranks: ranks on this host.

    A launcher may have bound the rank to CPUs of its own already: they are taken as they are once they are no more than
    an even share of what the host or the container has.
    """
    if not devices.is_cuda(device):
        return torch.get_num_threads(), frozenset()
    index = devices.current("cuda").index if device.index is None else device.index
    ranks, position = _sharers(index, local_ranks, root)
    near = _near(index, root)
    allowed = allowed_cpus()
    everyones = container_cpus(root) | allowed
    cores = physical_cores(allowed & near or allowed, root)
    count = _share(len(cores), len(physical_cores(everyones & near or everyones, root)), ranks)
    if count < len(cores) and position is not None:
        start = position * count % len(cores)
        cores = cores[start : start + count]
    return _within_quota(count, local_ranks, root), frozenset(cores)


def cpus_of_a_rank(local_ranks: int, root: Path = SYS) -> int:
    """How many CPUs one of `local_ranks` on this host may keep busy: its share of what the container has."""
    allowed = allowed_cpus()
    count = _share(len(allowed), len(container_cpus(root) | allowed), local_ranks)
    return _within_quota(count, local_ranks, root)


def _share(allowed: int, everyones: int, ranks: int) -> int:
    """How many of `allowed` CPUs one of `ranks` gets: all, where a launcher gave it no more than an even share."""
    return allowed if allowed <= max(1, everyones // ranks) else max(1, allowed // ranks)


def _within_quota(count: int, local_ranks: int, root: Path) -> int:
    """No more CPUs than this rank's part of the time that the container may use."""
    quota = container_quota(root) / local_ranks
    return count if quota >= count else max(1, int(quota))


def bind_to(cpus: Collection[int]) -> bool:
    """Keep this thread, and threads that it starts from now on, on `cpus`; whether it could be done.

    The system may forbid it, and a step only runs slower then, so that is no error. No CPUs: nothing is changed.
    """
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(0, cpus)  # 0: the thread that asks
    except OSError:
        return False
    return True


@contextmanager
def bound_to(cpus: Collection[int]) -> Iterator[None]:
    """The thread is bound as by `bind_to` inside, and goes back to where it was."""
    before = allowed_cpus()
    bound = bind_to(cpus)
    try:
        yield
    finally:
        if bound:
            bind_to(before)


def physical_cores(cpus: Collection[int], root: Path = SYS) -> list[int]:
    """The first of `cpus` on each physical core, ascending: hardware threads of one core share its bandwidth."""
    cores, covered = [], set[int]()
    for cpu in sorted(cpus):
        if cpu not in covered:
            cores.append(cpu)
            covered |= _listed(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return cores


def numa_nodes(root: Path = SYS) -> dict[int, frozenset[int]]:
    """CPUs of each NUMA node that has any; nothing where the system does not say."""
    nodes = {}
    for folder in root.glob("devices/system/node/node[0-9]*"):
        cpus = _listed(folder / "cpulist")
        if cpus:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes


def container_cpus(root: Path = SYS) -> frozenset[int]:
    """CPUs of this process's control group, else of the host: what all local ranks have together."""
    for folder in control_groups("cpu", "cpuset", root=root):
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):  # of version 2, and of version 1
            if cpus := _listed(folder / name):
                return cpus
    return _listed(root / "devices/system/cpu/online")


def container_quota(root: Path = SYS) -> float:
    """CPUs' worth of time that this process's control group may use; infinite without a limit."""
    quotas = [math.inf]
    for folder in control_groups("cpu", "cpuset", root=root):
        numbers = text_of(folder / "cpu.max").split()  # version 2: "quota period", or "max period"
        if not numbers:
            numbers = [text_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]  # version 1; -1: none
        with suppress(ValueError, ZeroDivisionError):
            quota = int(numbers[0]) / int(numbers[1])
            quotas.append(quota if quota > 0 else math.inf)
    return min(quotas)


def _near(index: int, root: Path) -> frozenset[int]:
    """CPUs of the NUMA node that GPU `index` is attached to; none where that is not known."""
    return numa_nodes(root).get(_node_of(index, root), frozenset())


def _node_of(index: int, root: Path) -> int:
    """The NUMA node of GPU `index`, -1 if not known."""
    with suppress(ValueError):
        return int(text_of(root / "bus/pci/devices" / _pci_address(index) / "numa_node"))
    return -1


def _sharers(index: int, local_ranks: int, root: Path) -> tuple[int, int | None]:
    """How many local ranks have GPUs on the NUMA node of GPU `index`, and which of them it is, None if not known."""
    if devices.count() < local_ranks:  # the launcher shows each rank its own GPU alone
        nodes = len(numa_nodes(root)) if _near(index, root) else 1
        return -(-local_ranks // max(1, nodes)), None
    node = _node_of(index, root)
    sharing = [other for other in range(local_ranks) if _node_of(other, root) == node]
    return max(1, len(sharing)), sharing.index(index) if index in sharing else None


def _pci_address(index: int) -> str:
    """The address of GPU `index`, as folders below /sys/bus/pci/devices are called; empty if torch does not tell."""
    properties = devices.properties(index)
    if not hasattr(properties, "pci_domain_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _listed(path: Path) -> frozenset[int]:
    """CPUs of a file such as "0-3,8": none if there is no such file."""
    cpus: set[int] = set()
    for part in text_of(path).split(","):
        first, _, last = part.partition("-")
        with suppress(ValueError):
            cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
