"""Training that goes wrong on purpose, and goes on: an error in forward or backward, or gradients too large in fp16."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import terrazzo as tz
from hostcuda.device import FAULTS, Watching, report
from terrazzo.config import config_from_dict
from terrazzo.train.session.data_share import DataShare
from terrazzo.train.steps.judge import StepJudge
from tests.hostcuda.cases import WIDTH, Block, Case, mesh_of

__all__ = ["Failed", "diverges", "fails_and_goes_on", "overflows_and_goes_on", "scaled_apart"]


class Failed(RuntimeError):
    """It was meant to."""


class _Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise Failed("in backward")


class Faulty(nn.Module):
    """Raises in the part of a step that `fails` names, once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fails = Block(), ""

    def forward(self, x: Tensor) -> Tensor:
        fails, self.fails = self.fails, ""
        if fails == "forward":
            raise Failed("in forward")
        x = self.inner(x)
        return _Fuse.apply(x) if fails == "backward" else x  # type: ignore[no-any-return, no-untyped-call]


def held(model: nn.Module) -> int:
    """Bytes on the device, once nothing is on its way to the host."""
    with tz.gathered(model):
        pass
    gc.collect()
    return torch.cuda.memory_allocated()


def diverges(norms: list[float]) -> tuple[list[str], int | None, str | None]:
    """Faults that the device finds; in which of the steps with these norms a run ends, and what it says, if it does."""
    report.take()
    ended: tuple[int | None, str | None] = None, None
    with Watching():
        device = torch.device("cuda", torch.cuda.current_device())
        session: Any = SimpleNamespace(
            step=0,
            config=config_from_dict({}),
            ranks=SimpleNamespace(device=device),
            share=DataShare(0, 1),
            checkpoints=SimpleNamespace(saved_step=0),
            optimizer=SimpleNamespace(scaler_state=dict),
        )
        judge = StepJudge(session)
        for step, norm in enumerate(norms):
            try:
                assert judge.objection(torch.ones((), device=device), torch.full((), norm, device=device)) is None
            except tz.Diverged as error:
                ended = step, str(error)
                break
            session.step += 1
    return [str(finding) for finding in report.take() if finding.kind in FAULTS], *ended


def fails_and_goes_on(plan: str, where: str) -> tuple[list[str], int, list[float]]:
    """Faults that the device finds; bytes on it that the failure has left; losses of the steps after it, on both."""
    losses, left = [], 0
    report.take()
    with Watching():
        for device in ("cuda", "cpu"):
            torch.manual_seed(0)
            faulty = Faulty()
            model, optimizer = tz.shard(
                nn.Sequential(Block(), faulty, Block(), nn.Linear(WIDTH, 8)),
                lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=False),
                plan,
                units=[Block],
                mesh=mesh_of(Case(), device),
                offload=tz.Offload(threads=1).used_under(tz.Plan.named(plan)),
            )
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)

            def step(model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = x) -> float:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return float(loss.detach())

            step()
            before = held(model)
            faulty.fails = where
            try:
                step()
            except Failed:
                optimizer.zero_grad()
            else:
                raise AssertionError("it did not fail")
            losses.append(step())
            left += held(model) - before
            losses.append(step())
    return [str(finding) for finding in report.take() if finding.kind in FAULTS], left, losses


def overflows_and_goes_on(tier: str) -> tuple[list[str], list[list[float]]]:
    """Faults that the device finds; losses, and the scale and the skipped steps after each step, on both devices."""
    precision = replace(tz.Precision.named("fp16"), loss_scaling=tz.LossScaling(init=1024.0, interval=2))
    report.take()
    said: list[list[float]] = []
    with Watching():
        for device in ("cuda", "cpu"):
            torch.manual_seed(0)
            model, optimizer = tz.shard(
                nn.Sequential(Block(), nn.Linear(WIDTH, 8)),
                lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=False),
                f"zero3{tier}",
                units=[Block],
                precision=precision,
                mesh=mesh_of(Case(), device),
                offload=tz.Offload(threads=1).used_under(tz.Plan.named(f"zero3{tier}")),
            )
            said.append([])
            for factor in (1.0, 1e3, 1.0, 1.0):
                loss = model(torch.ones(8, WIDTH, device=device)).square().mean()
                (loss * factor).backward()
                optimizer.step()
                optimizer.zero_grad()
                said[-1] += [float(loss.detach()), optimizer.loss_scale, optimizer.skipped_steps]
    return [str(finding) for finding in report.take() if finding.kind in FAULTS], said


def scaled_apart(factors: list[float]) -> str:
    """What is said where this rank's gradients are multiplied by its own of the factors, a number on the device."""
    model, optimizer = tz.shard(
        nn.Sequential(Block(), nn.Linear(WIDTH, 8)),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2, foreach=False),
        "zero2",
        units=[Block],
        mesh=mesh_of(Case(), "cuda"),
    )
    factor = torch.full((), factors[torch.distributed.get_rank()], device="cuda")
    for _ in range(2):
        try:
            model(torch.ones(8, WIDTH, device="cuda")).square().mean().backward()
        except tz.RanksApart as error:
            return str(error)
        for parameter in model.parameters():
            parameter.grad.mul_(factor)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        factor.mul_(1.0)
    return ""
