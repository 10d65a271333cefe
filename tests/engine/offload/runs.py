"""Trains the parity tests' cases with states on other tiers, and compares what comes out bit by bit.

States are looked at after the last step only: looking waits for every update, and would leave nothing overlapped.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import terrazzo as tz
from terrazzo.engine import Precision
from terrazzo.engine.offload import updater
from tests.engine import parity
from tests.engine.models import base_model
from tests.engine.parity import CUSTOM, Case, Ranks, Trace, assemble, assert_same_bits, computed_with
from tests.engine.reference import Recipe, Step, Trainer
from tests.helpers.threads import run_in_threads

SMALL_BLOCK = 4 / 1024
"""MiB. The smallest cells, of 4,096 elements."""

PLANS = [
    *(Case(plan, 2) for plan in ("zero0", "zero1", "zero2", "zero3", "shard_grad_op")),
    *(Case(plan, 2, replicas=2) for plan in ("hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz", CUSTOM)),
]
TIERS: dict[str, dict[str, str]] = {
    "weight on cpu": {"weight": "cpu"},
    "grad on cpu": {"grad": "cpu"},
    "optim on cpu": {"optim": "cpu"},
    "weight on nvme": {"weight": "nvme"},
    "grad on nvme": {"grad": "nvme"},
    "optim on nvme": {"optim": "nvme"},
    "cpu": {"grad": "cpu", "optim": "cpu"},
    "cpu-all": {"weight": "cpu", "grad": "cpu", "optim": "cpu"},
    "nvme": {"grad": "cpu", "optim": "nvme"},
    "nvme-all": {"weight": "nvme", "grad": "cpu", "optim": "nvme"},
    "all on nvme": {"weight": "nvme", "grad": "nvme", "optim": "nvme"},
    "crossed": {"weight": "nvme", "grad": "nvme", "optim": "cpu"},
    "shares": {"weight": "cpu:0.5", "grad": "nvme:0.5", "optim": "nvme:0.25,cpu:0.5"},
}
MODES = ("overlapped", "synchronous", "backward")


def plan_id(case: Case) -> str:
    return case.plan if isinstance(case.plan, str) else "custom"


def on_tiers(case: Case, tiers: str, folder: Path | None = None, mode: Any = "overlapped", **settings: Any) -> Case:
    """The case with states on one of `TIERS`, and a ring of buffers shorter than a unit's cells."""
    options = {"block_mib": SMALL_BLOCK, "depth": 2, "direct": False, **settings}
    moved = replace(case, tiers=tuple(TIERS[tiers].items()))
    return replace(moved, offload=tz.Offload(path=folder, step=mode, **options).used_under(moved.placed))


def fused(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


class Runner(parity.Runner):
    """Trains, and looks at the end."""

    def run(self) -> tuple[list[Trace], dict[str, Tensor]]:
        traces = []
        for _ in range(self.case.steps):
            traces.append(Trace(self.backward()))
            self.update()
        self.look(traces[-1])
        return traces, self.computed()


def train(case: Case, **options: Any) -> Ranks:
    base_model(case.variant)  # built here: the threads would share one random generator
    options = {"make_optimizer": fused, **options}
    return run_in_threads(case.ranks, lambda rank: Runner(case, rank, **options).run())


@functools.cache
def by_hand(recipe: Recipe, make_optimizer: Callable[[nn.Module], Optimizer] = fused) -> list[Step]:
    """The reference under a fused optimizer, computed once for all plans and tiers that share it."""
    trainer = Trainer(recipe, make_optimizer, padded=True)
    return [trainer.step() for _ in range(recipe.steps)]


@functools.cache
def by_hand_with_bf16_moments(recipe: Recipe) -> list[Step]:
    trainer, steps = Trainer(recipe, fused, padded=True), []
    for _ in range(recipe.steps):
        step = trainer.step()
        for state in trainer.optimizer.state.values():
            state.update({kind: value.bfloat16().float() for kind, value in state.items() if kind != "step"})
        step.states = {key: value if key[1] == "step" else value.bfloat16() for key, value in step.states.items()}
        steps.append(step)
    return steps


MOMENTS = Precision(moments=torch.bfloat16)


def expected(case: Case) -> list[Step]:
    return by_hand_with_bf16_moments(case.recipe) if case.dtypes == MOMENTS else by_hand(case.recipe)


def check(case: Case, **options: Any) -> None:
    """Train the case on threads and compare it with the reference."""
    assert_reference(case, train(case, **options), expected(case))


def assert_reference(case: Case, ranks: Ranks, wanted: list[Step]) -> None:
    """Losses of every step; master weights, optimizer states and the weights computed with after the last."""
    for number, step in enumerate(wanted):
        assert [traces[number].losses for traces, _ in ranks] == step.losses, f"losses of step {number}"
    last = [traces[-1] for traces, _ in ranks]
    for kind in ("weights", "states"):
        assert_same_bits(assemble([getattr(trace, kind) for trace in last], kind), getattr(wanted[-1], kind), kind)
    for _, parameters in ranks:
        assert_same_bits(parameters, computed_with(case, wanted[-1]), "weights computed with")


def assert_same(found: Ranks, wanted: Ranks) -> None:
    """Two runs of the same case on different tiers."""
    for number in range(len(wanted[0][0])):
        losses = [[traces[number].losses for traces, _ in ranks] for ranks in (found, wanted)]
        assert losses[0] == losses[1], f"losses of step {number}"
    for kind in ("weights", "states"):
        sides = [assemble([getattr(traces[-1], kind) for traces, _ in ranks], kind) for ranks in (found, wanted)]
        assert_same_bits(sides[0], sides[1], kind)
    for (_, mine), (_, others) in zip(found, wanted, strict=True):
        assert_same_bits(mine, others, "weights computed with")


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No update away from the device begins before the event is set; it is set at the end."""
    gate, step = threading.Event(), updater.step_segment

    def waiting(*args: Any) -> None:
        assert gate.wait(120)
        step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(updater, "step_segment", waiting)
        try:
            yield gate
        finally:
            gate.set()
