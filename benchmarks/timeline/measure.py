"""What a rank does: every contender trains on every machine, and tells what its step is made of."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.timeline.contenders import CONTENDERS, Trainee
from benchmarks.timeline.model import SCALE, WIDTH, Model
from benchmarks.timeline.waits import waits
from hostcuda.device import report, start, virtual

__all__ = ["become", "join", "outcomes"]

NANO = 9
"""Digits of a second."""


def join(job: dict[str, Any], rank: int) -> None:
    """Become a rank with a device."""
    world = job["ranks"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    start(home=rank, devices=world)
    store = dist.FileStore(job["store"], world)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=world)


def outcomes(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One for every contender in every cell; see `outcome.Outcome`."""
    mesh = init_device_mesh("cuda", tuple(job["mesh"].values()), mesh_dim_names=tuple(job["mesh"]))
    for contender in job["contenders"]:
        gc.collect()  # the contender before it has circles
        others_bytes = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        for found in _trained(CONTENDERS[contender](Model(WIDTH // SCALE), mesh), job["cells"]):
            if report.faults:
                raise RuntimeError(f"{contender}: " + "\n".join(map(str, report.faults)))
            report.take()
            found["peak_bytes"] = (found["peak_bytes"] - others_bytes) * SCALE**2
            yield {"contender": contender, **found}


def _trained(trainee: Trainee, cells: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A step in each cell, from the end of a forward to the end of the next: what a step begins is over by then."""
    for tokens, same in groupby(cells, key=lambda cell: int(cell["cell"]["tokens"])):
        x = torch.randn(tokens // SCALE, WIDTH // SCALE, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):  # the first of all may differ
            loss = _forward(trainee, x)
            loss.backward()
            _step(trainee)
        loss = _forward(trainee, x)
        for cell in same:
            become(cell["figures"])
            found, loss = _measured(trainee, x, loss)
            yield {**cell["cell"], **found}
        loss.backward()
        _step(trainee)
        torch.cuda.synchronize()  # what the step has begun uses the memory of who is let go now


def _measured(trainee: Trainee, x: Tensor, loss: Tensor) -> tuple[dict[str, Any], Tensor]:
    parts: dict[str, Any] = {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    moments_s = [virtual.now_s()]
    with virtual.tracing() as spans:
        with _Part(parts, "backward"):
            loss.backward()
        moments_s.append(virtual.queued_s())
        with _Part(parts, "step"):
            _step(trainee)
        moments_s.append(virtual.queued_s())
        with _Part(parts, "forward"):
            loss = _forward(trainee, x)
        torch.cuda.synchronize()
        moments_s.append(virtual.now_s())
    for part, (begin_s, end_s) in zip(parts.values(), pairwise(moments_s), strict=True):
        part["waits"] = {what: round(waited, NANO) for what, waited in waits(spans, begin_s, end_s).items()}
    seconds = torch.tensor(moments_s[-1] - moments_s[0], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return {
        "step_s": round(float(seconds), NANO),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "parts": parts,
    }, loss


def become(figures: dict[str, float]) -> None:
    """Have the device and its links these speeds, by the names of `machines.Figures`."""
    virtual.set_speeds(figures["flops"], figures["memory"], figures["pcie"])
    virtual.LINKS.near, virtual.LINKS.far, virtual.LINKS.hop_s = figures["near"], figures["far"], figures["hop_s"]


class _Part:
    """A part of a step: seconds of its work, by what does it, and of its collectives by name and link."""

    def __init__(self, parts: dict[str, Any], name: str) -> None:
        self._parts, self._name = parts, name
        self._listening = virtual.listening()

    def __enter__(self) -> None:
        self._before, self._heard = virtual.spent_s(), self._listening.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._listening.__exit__(*error)
        after = virtual.spent_s()
        spent = {kind: round(after[kind] - before, NANO) for kind, before in self._before.items()}
        times: dict[str, list[float]] = {}
        for each in self._heard:
            times.setdefault(f"{each.name} {'near' if each.near else 'far'}", []).append(each.seconds)
        collectives = {
            name: {"calls": len(found), "total_s": round(sum(found), NANO), "longest_s": round(max(found), NANO)}
            for name, found in times.items()
        }
        self._parts[self._name] = {"spent": spent, "collectives": collectives}


def _forward(trainee: Trainee, x: Tensor) -> Tensor:
    return trainee.model(x).float().square().mean()  # type: ignore[no-any-return]


def _step(trainee: Trainee) -> None:
    trainee.optimizer.step()
    trainee.optimizer.zero_grad()
