"""One block of measurement: one contender, on fresh processes, for a few steps.

Fresh processes keep contenders from warming or fragmenting each other's memory, so that peaks are their own.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks.cases import CASES, Case
from benchmarks.contenders import CONTENDERS

MEMORY_STEPS = 2
M_MMAP_THRESHOLD = -3  # from glibc's malloc.h


@dataclass(frozen=True)
class Effort:
    """How much is run: ranks, untimed and timed steps per block, and the seed of the weights."""

    ranks: int
    warmup_steps: int
    steps: int
    seed: int


@dataclass(frozen=True)
class Block:
    """What one block found. Losses are [rank][step]; bytes are of one rank, above an empty process."""

    contender: str
    step_s: list[float]
    losses: list[list[float]]
    training_peak_bytes: int
    overall_peak_bytes: int

    @property
    def median_s(self) -> float:
        """The median time of a step."""
        return median(self.step_s)


def measure(case: str, contender: str, effort: Effort) -> Block:
    """Run one block on `effort.ranks` new processes with one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    config = LaunchConfig(
        run_id="benchmark",
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=effort.ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )
    reports = elastic_launch(config, _one_rank)(case, contender, effort)
    ranks = [reports[rank] for rank in range(effort.ranks)]
    return Block(
        contender,
        step_s=[max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True)],
        losses=[rank["losses"] for rank in ranks],
        training_peak_bytes=max(rank["training_peak_bytes"] for rank in ranks),
        overall_peak_bytes=max(rank["overall_peak_bytes"] for rank in ranks),
    )


def _one_rank(case_name: str, contender: str, effort: Effort) -> dict[str, list[float] | int]:
    """Body of one process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    _import_what_all_need()
    _forget_peak()
    empty_bytes = _status_bytes("VmRSS")
    torch.manual_seed(effort.seed)
    case = CASES[case_name]
    model, optimizer = CONTENDERS[contender](case.model())
    losses = [_step(case, step, model, optimizer)[0] for step in range(effort.warmup_steps)]
    timed = [_step(case, effort.warmup_steps + step, model, optimizer) for step in range(effort.steps)]
    overall_peak_bytes = _status_bytes("VmHWM") - empty_bytes
    # A second look at memory: without what building the model and the first steps needed, and with large
    # allocations returned as soon as they are freed, so that it shows what is used and not what malloc keeps.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    _forget_peak()
    done = effort.warmup_steps + effort.steps
    last = [_step(case, done + step, model, optimizer)[0] for step in range(MEMORY_STEPS)]
    report: dict[str, list[float] | int] = {
        "step_s": [seconds for _, seconds in timed],
        "losses": [*losses, *(loss for loss, _ in timed), *last],
        "training_peak_bytes": _status_bytes("VmHWM") - empty_bytes,
        "overall_peak_bytes": overall_peak_bytes,
    }
    dist.barrier()
    dist.destroy_process_group()
    return report


def _step(case: Case, step: int, model: nn.Module, optimizer: Optimizer) -> tuple[float, float]:
    """One training step: this rank's loss, and the seconds from a common start to the end of the update."""
    tokens, targets = case.tokens(step, dist.get_rank())
    dist.barrier()
    begin = time.perf_counter()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), time.perf_counter() - begin


def _import_what_all_need() -> None:
    """Load what torch loads late, so that no contender pays for code in its memory figure."""
    linear = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(linear.parameters(), fused=True)
    linear(torch.ones(1, 1)).sum().backward()
    optimizer.step()


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
