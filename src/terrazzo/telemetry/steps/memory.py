"""How much memory this process uses, on its CUDA device or resident, and how much the machine has left."""

from __future__ import annotations

import os
import resource
import sys
from itertools import product
from pathlib import Path

import torch

from terrazzo.engine.runtime import device as devices
from terrazzo.processes.system import SYS, control_groups, text_of

__all__ = ["PeakMemory", "allowed_bytes", "available_host_bytes", "resident_bytes"]


class PeakMemory:
    """The highest memory use of this process so far, in bytes; `device` is the model's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def peak_bytes(self) -> int:
        """CUDA: bytes held by tensors at the peak. CPU: peak resident bytes of the process, libraries included."""
        if devices.is_cuda(self._device):
            return devices.peak_bytes(self._device)
        if (highest := _lines_of(Path("/proc/self/status")).get("VmHWM")) is not None:
            return highest
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # may be the peak of this one's parent
        return usage if sys.platform == "darwin" else usage * 1024


def resident_bytes() -> int | None:
    """Bytes of this process in memory now, libraries included; None if the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_host_bytes(root: Path = SYS) -> int | None:
    """Bytes that processes of this machine can still take, swap included; None if the system does not tell.

    It is what the kernel calls available, or what this process's control group or one above it still allows, whichever
    is less.

    Args:
        root: the folder of the system's files, beside `proc`; for tests.
    """
    meminfo = _lines_of(root.parent / "proc/meminfo")
    if "MemAvailable" not in meminfo:
        return None
    free = [meminfo["MemAvailable"] + meminfo.get("SwapFree", 0)]
    for folder, (limit, used, cache) in product(control_groups("memory", root=root), _GROUP_FILES):
        allowed, taken = text_of(folder / limit), text_of(folder / used)
        if allowed.isdigit() and taken.isdigit():  # not absent, nor "max"
            free.append(int(allowed) - int(taken) + _statistic(folder / "memory.stat", cache))
    return max(0, min(free))


def allowed_bytes() -> list[int]:
    """Bytes that each limit on this process's memory (RLIMIT_DATA, RLIMIT_AS) still allows; empty without limits."""
    used = _lines_of(Path("/proc/self/status"))
    left = []
    for limit, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY and name in used:
            left.append(max(0, most - used[name]))
    return left


_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of cgroups 2 and 1: the files of limit and use, and the key in `memory.stat` of cache that the kernel can drop."""


def _lines_of(path: Path) -> dict[str, int]:
    """Bytes by name, from a file with lines such as `MemAvailable:  123 kB`."""
    words = [line.replace(":", " ").split() for line in text_of(path).splitlines()]
    return {line[0]: int(line[1]) << 10 for line in words if len(line) == 3 and line[2] == "kB"}


def _statistic(path: Path, name: str) -> int:
    lines = text_of(path).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
