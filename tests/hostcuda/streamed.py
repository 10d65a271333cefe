"""Replicas whose fragments are exchanged beside training, on the simulated device and on the host, in one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import terrazzo as tz
from hostcuda.device import FAULTS, Watching, report
from terrazzo.engine import engine_of
from tests.hostcuda.cases import EPS, LR, apart

__all__ = ["Streamed", "stream"]

ROUNDS, WIDTH = 2, 64


class Streamed(NamedTuple):
    """Both devices, seen by one rank: the largest difference of weights, of the largest one, and what is found.

    Attributes:
        held, promised: transient bytes on the simulated device.
    """

    weights: float
    faults: list[str]
    held: int
    promised: int


def stream(plan: str, traffic: Any) -> Streamed:
    """Rounds of two fragments with a delay."""
    settings = tz.DiLoCo(4, lr=0.6, traffic=traffic, fragments=2, delay=2, meet_every=8)
    report.take()
    with Watching():
        on_device, held, promised = _trained(plan, settings, "cuda")
    faults = [str(finding) for finding in report.take() if finding.kind in FAULTS]
    on_host, *_ = _trained(plan, settings, "cpu")
    return Streamed(max(apart(on_device[name], on_host[name]) for name in on_host), faults, held, promised)


def _trained(plan: str, settings: tz.DiLoCo, device: str) -> tuple[dict[str, Tensor], int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device)
    make = lambda parameters: torch.optim.AdamW(parameters, lr=LR, eps=EPS)  # noqa: E731
    mesh = tz.mesh(dp_replicate=2, device=device)
    model, optimizer = tz.shard(model, make, plan, mesh=mesh, units=["*"], diloco=settings)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(ROUNDS * settings.round_steps - 1):  # the last round is left open: weights are of this replica
        model(torch.randn(8, WIDTH, generator=data).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    weights = {name: value.cpu() for name, value in tz.full_state_dict(model, keep=True).items()}
    return weights, engine.peak_transient_bytes, engine.bill.transient_bytes
