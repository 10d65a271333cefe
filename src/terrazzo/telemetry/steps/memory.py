"""Memory of this process, on the CUDA device or resident, and memory that the machine has left."""

from __future__ import annotations

import os
import resource
import sys
from itertools import product
from pathlib import Path

import torch

from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.system import SYS, control_groups, text_of

__all__ = ["PeakMemory", "allowed_bytes", "available_host_bytes", "resident_bytes"]


class PeakMemory:
    """The highest memory use since the start of the run, in bytes; `device` is where the model lives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def peak_bytes(self) -> int:
        """CUDA: bytes held by tensors at the peak. CPU: peak resident bytes of the process, libraries included."""
        if devices.is_cuda(self._device):
            return devices.peak_bytes(self._device)
        if (highest := _lines_of(Path("/proc/self/status")).get("VmHWM")) is not None:
            return highest
        usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # that of who started this process counts too
        return usage if sys.platform == "darwin" else usage * 1024


def resident_bytes() -> int | None:
    """Memory of this process that is in use now, libraries included; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_host_bytes(root: Path = SYS) -> int | None:
    """Memory that processes of this machine can still take, swap included; None where the system does not tell.

    What the kernel calls available, or what this process's control group, or one above it, leaves if that is less.
    `root` is where the system's files are; `proc` is beside it.
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
    """What each limit on this process's own memory (RLIMIT_DATA, RLIMIT_AS) still allows it; empty without limits."""
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
"""Files of cgroups 2 and 1: limit, use, and the key in `memory.stat` of what the kernel gives back when needed."""


def _lines_of(path: Path) -> dict[str, int]:
    """Bytes by name of a file with lines such as `MemAvailable:  123 kB`."""
    words = [line.replace(":", " ").split() for line in text_of(path).splitlines()]
    return {line[0]: int(line[1]) << 10 for line in words if len(line) == 3 and line[2] == "kB"}


def _statistic(path: Path, name: str) -> int:
    lines = text_of(path).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
