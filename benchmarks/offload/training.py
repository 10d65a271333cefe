"""Whole training steps: plans with and without offloaded states, in the same gloo ranks of one thread each.

On a CPU the tiers `device` and `cpu` are the same memory, so what the tier costs is what the engine does for it. A turn
is one step that does not count, so that an update left for the next forward is under way, then some that do.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.optim import AdamW

import terrazzo as tz
from benchmarks.cpu.cases import CASES, Case
from benchmarks.cpu.loops import HYPERPARAMETERS
from benchmarks.cpu.models import UNITS
from benchmarks.cpu.rank import join
from benchmarks.offload.turns import Others, seconds, take_turns
from terrazzo.engine import engine_of

StepMode = Literal["overlapped", "synchronous", "backward"]
PLANS: dict[str, tuple[str, StepMode]] = {
    "device": ("zero3", "overlapped"),
    "cpu, overlapped": ("zero3@cpu", "overlapped"),
    "cpu, synchronous": ("zero3@cpu", "synchronous"),
    "cpu, backward": ("zero3@cpu", "backward"),
    "nvme, overlapped": ("zero3@nvme", "overlapped"),
    "nvme, synchronous": ("zero3@nvme", "synchronous"),
    "nvme, backward": ("zero3@nvme", "backward"),
}
PER_TENSOR = "per tensor"
MODELS = {
    "normal": CASES["compute"],
    "few tokens": replace(CASES["traffic"], shape=replace(CASES["traffic"].shape, blocks=7)),
    "tiny": CASES["tiny"],
}


@dataclass(frozen=True)
class Part:
    """One of `MODELS` on some ranks: who takes turns, how often, and timed steps in a turn."""

    model: str
    ranks: int
    names: tuple[str, ...]
    rounds: int
    steps: int = 2


PARTS = {
    "normal, 1 rank": Part("normal", 1, ("device", "cpu, overlapped"), 9),
    "normal, 2 ranks": Part("normal", 2, ("device", "cpu, overlapped"), 9),
    "few tokens, 1 rank": Part("few tokens", 1, (*PLANS, PER_TENSOR), 5),
}


def measure(folder: Path, parts: dict[str, Part] = PARTS) -> dict[str, Any]:
    """Seconds of a step of the slower rank, by part and contender."""
    return {name: _measure(part, folder) for name, part in parts.items()}


def _measure(part: Part, folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="terrazzo-bench-", dir=folder) as scratch:
        os.environ["OMP_NUM_THREADS"] = "1"
        spawn(_run_rank, (scratch, part), nprocs=part.ranks)
        ranks = [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(part.ranks)]
    turns = {name: slower([rank["turns"][name] for rank in ranks]) for name in part.names}
    return {**asdict(part), "about": MODELS[part.model].describe(), "others": ranks[0]["others"], "turns": turns}


def slower(ranks: list[list[float]]) -> list[float]:
    """Each turn as long as it took the slower rank."""
    return [max(turn) for turn in zip(*ranks, strict=True)]


def _run_rank(rank: int, folder: str, part: Part) -> None:
    join(rank, part.ranks, os.path.join(folder, "store"), limit_s=300)
    loops = {name: _loop(name, MODELS[part.model], folder) for name in part.names}
    acts = {name: partial(_turn, loop, part.steps) for name, loop in loops.items()}
    others = Others(_total)
    turns = take_turns(acts, part.rounds, others)
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"turns": turns, "others": others.kept}))
    for loop in loops.values():
        loop.close()
    dist.barrier()
    dist.destroy_process_group()


def _total(own: float) -> float:
    summed = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(summed)
    return float(summed)


class Loop(Protocol):
    """A model in training."""

    def step(self) -> None:
        """Forward, backward and update."""

    def settle(self) -> None:
        """Let an update that is under way end."""

    def close(self) -> None:
        """Leave no files."""


def _turn(loop: Loop, steps: int) -> float:
    """Seconds of a step in the steady state, from a common start."""
    loop.step()
    dist.barrier()

    def train() -> None:
        for _ in range(steps):
            loop.step()

    taken = seconds(train)
    loop.settle()
    dist.barrier()
    return taken / steps


def _loop(name: str, case: Case, folder: str) -> Loop:
    torch.manual_seed(0)
    return PerTensor(case) if name == PER_TENSOR else Own(case, *PLANS[name], folder)


class Own:
    """Terrazzo under one plan."""

    def __init__(self, case: Case, plan: str, step: StepMode, folder: str) -> None:
        model, self.batches = case.model(), _batches(case)
        optimizer = AdamW(model.parameters(), **HYPERPARAMETERS)
        offload = tz.Offload(path=folder, step=step).used_under(tz.Plan.named(plan))
        self.model, self.optimizer = tz.shard(
            model, optimizer, plan=plan, units=[UNITS[0]], precision=case.precision, offload=offload
        )

    def step(self) -> None:
        _backward(self.model, next(self.batches))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        engine_of(self.model).settle()

    def close(self) -> None:
        engine_of(self.model).close()


class PerTensor:
    """torchao's way on one rank: each gradient is copied when it is there, each tensor has an optimizer of its own."""

    def __init__(self, case: Case) -> None:
        self.model, self.batches = case.model(), _batches(case)
        self.pairs: list[tuple[nn.Parameter, nn.Parameter, AdamW]] = []
        for device in self.model.parameters():
            host = nn.Parameter(device.detach().clone())
            host.grad = torch.zeros_like(host)
            self.pairs.append((device, host, AdamW([host], **HYPERPARAMETERS)))
            device.register_post_accumulate_grad_hook(_copier(host))

    def step(self) -> None:
        _backward(self.model, next(self.batches))
        with torch.no_grad():
            for device, host, optimizer in self.pairs:
                optimizer.step()
                device.copy_(host)
                device.grad = None

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


def _copier(host: nn.Parameter) -> Any:
    def copy(device: Tensor) -> None:
        assert host.grad is not None and device.grad is not None
        host.grad.copy_(device.grad)

    return copy


def _batches(case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    return (case.tokens(number, dist.get_rank()) for number in range(1 << 30))


def _backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    tokens, targets = batch
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
