"""What runs inside one rank's process: one contender's loop, its steps, their times, their memory and their bytes."""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.cpu.cases import CASES
from benchmarks.cpu.contenders import CONTENDERS

M_MMAP_THRESHOLD = -3  # from glibc's malloc.h
WIRE_PIECE_BYTES = 32 << 20


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
    """One contender, built and ready to step.

    Attributes:
        start_s: from plain model to the end of its first step.
    """

    def __init__(self, start: Start) -> None:
        join(start.rank, start.world_size, start.store, limit_s=120)
        _load_shared_code()
        contender = CONTENDERS[start.contender]
        for library in (contender.library, "torch.distributed.fsdp", "torch.distributed.optim", "terrazzo"):
            importlib.import_module(library)  # code is no part of a contender's memory
        _forget_peak()
        self.empty_bytes = _status_bytes("VmRSS")
        self.case, self.done = CASES[start.case], 0
        self.data_rank = self.case.data_rank(start.rank, start.world_size)
        torch.manual_seed(start.seed)
        model = self.case.model()
        dist.barrier()
        begun = time.perf_counter()
        self.loop = contender.start(model, self.case)
        del model
        self.steps(1)
        self.start_s = time.perf_counter() - begun

    def steps(self, count: int) -> Steps:
        """Train `count` more steps."""
        times = [self._step() for _ in range(count)]
        return Steps(*(list(column) for column in zip(*times, strict=True)))

    def startup_s(self) -> float:
        """Seconds from the plain model to the end of the first step."""
        return self.start_s

    def sent_bytes(self) -> int | None:
        """What this rank has sent so far, where the contender counts it itself."""
        return self.loop.sent_bytes()

    def overall_peak_bytes(self) -> int:
        """Peak so far above the empty process, with building and what malloc keeps of freed memory."""
        return _status_bytes("VmHWM") - self.empty_bytes

    def training_peak_bytes(self, count: int) -> int:
        """Peak of `count` more steps, with large blocks returned as soon as they are freed."""
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
        _forget_peak()
        self.steps(count)
        return _status_bytes("VmHWM") - self.empty_bytes

    def wire_s(self, count_bytes: int) -> float:
        """Seconds to bring `count_bytes` from the other ranks here by the fastest way known, all ranks at once."""
        from terrazzo.engine.comm.backends import collectives_for
        from terrazzo.engine.comm.transfer import Transfer
        from terrazzo.engine.instrumentation.traffic import Ledger, Traffic

        world = dist.group.WORLD
        assert world is not None
        along = collectives_for(world, torch.device("cpu"), Traffic(), Ledger())
        full = torch.ones(WIRE_PIECE_BYTES // 4 * along.size)
        coming_bytes = WIRE_PIECE_BYTES * (along.size - 1)
        Transfer(along.all_gather(full)).finish()
        dist.barrier()
        pieces, begun = 8, time.perf_counter()
        for _ in range(pieces):
            Transfer(along.all_gather(full)).finish()
        return (time.perf_counter() - begun) * count_bytes / (pieces * coming_bytes)

    def _step(self) -> tuple[float, float, float]:
        """Seconds from a common start to the end of the update, CPU seconds of the same, this rank's mean loss."""
        count = self.case.accumulate
        batches = [self.case.tokens(count * self.done + index, self.data_rank) for index in range(count)]
        dist.barrier()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        loss = self.loop.micro_batches(batches)
        self.loop.update()
        self.done += 1
        took = time.perf_counter() - wall_s, time.process_time() - cpu_s
        return *took, self.loop.shown(loss).item()


def join(rank: int, world_size: int, store: str, limit_s: float) -> None:
    """Become a quiet gloo rank of one thread; DeepSpeed also asks for the variables of a launcher."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    limit = timedelta(seconds=limit_s)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=limit
    )


def _load_shared_code() -> None:
    """What torch loads late and every contender uses."""
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
