"""What runs inside one rank's process: one contender's model, its steps, their times and their memory."""

from __future__ import annotations

import ctypes
import gc
import importlib
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.cases import CASES
from benchmarks.contenders import CONTENDERS

M_MMAP_THRESHOLD = -3  # from glibc's malloc.h


@dataclass(frozen=True)
class Start:
    """Everything that a rank needs to begin."""

    case: str
    contender: str
    seed: int
    rank: int
    world_size: int
    store: str


@dataclass(frozen=True)
class Steps:
    """What a few steps took on one rank, one entry per step; `cpu_s` counts all threads of the process."""

    wall_s: list[float]
    cpu_s: list[float]
    losses: list[float]


class Trainee:
    """One contender, built and ready to step."""

    def __init__(self, start: Start) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        store = dist.FileStore(start.store, start.world_size)
        limit = timedelta(seconds=120)
        dist.init_process_group("gloo", store=store, rank=start.rank, world_size=start.world_size, timeout=limit)
        _load_all_code()
        _forget_peak()
        self.empty_bytes = _status_bytes("VmRSS")
        self.case, self.rank, self.done = CASES[start.case], start.rank, 0
        torch.manual_seed(start.seed)
        self.model, self.optimizer = CONTENDERS[start.contender](self.case.model())

    def steps(self, count: int) -> Steps:
        """Train `count` more steps."""
        times = [self._step() for _ in range(count)]
        return Steps(*(list(column) for column in zip(*times, strict=True)))

    def overall_peak_bytes(self) -> int:
        """Peak so far above the empty process, with building and what malloc keeps of freed memory."""
        return _status_bytes("VmHWM") - self.empty_bytes

    def training_peak_bytes(self, count: int) -> int:
        """Peak of `count` more steps, with large blocks returned as soon as they are freed."""
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
        _forget_peak()
        self.steps(count)
        return _status_bytes("VmHWM") - self.empty_bytes

    def _step(self) -> tuple[float, float, float]:
        """Seconds from a common start to the end of the update, CPU seconds of the same, this rank's loss."""
        tokens, targets = self.case.tokens(self.done, self.rank)
        dist.barrier()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return time.perf_counter() - wall_s, time.process_time() - cpu_s, loss.item()


def _load_all_code() -> None:
    """Every contender's library, and what torch loads late: code is no part of a contender's memory."""
    for library in ("torch.distributed.fsdp", "torch.distributed.optim", "terrazzo"):
        importlib.import_module(library)
    linear = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(linear.parameters(), fused=True)
    linear(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    dist.barrier()


def _forget_peak() -> None:
    """Give freed memory back to the system and restart the kernel's high-water mark (Linux: man 5 proc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(field: str) -> int:
    """`VmRSS` (resident now) or `VmHWM` (its peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; peak memory is measured on Linux only")
