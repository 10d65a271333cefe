"""Stock optimizers on flat shards: each bit as on whole parameters, with param groups and schedulers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, OneCycleLR

from tests.engine.parity import Case, Runner, assert_parity, run_on_threads
from tests.engine.reference import Recipe, Step, Trainer
from tests.helpers.cover import mostly_long
from tests.helpers.threads import run_in_threads


class Lion(Optimizer):
    """A user's optimizer (Chen et al., arXiv 2302.06675), which says of itself that it is elementwise."""

    elementwise = True

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean: Tensor = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                    parameter.sub_(mean.lerp(parameter.grad, 1 - beta1).sign_(), alpha=group["lr"])
                    mean.lerp_(parameter.grad, 1 - beta2)


OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "AdamW maximize": (torch.optim.AdamW, {"lr": 1e-2, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "Adam fused amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "Adagrad fused": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2, "t0": 2}),
    "Lion": (Lion, {"lr": 1e-3}),
}
SHORT = ("AdamW foreach", "Adam fused amsgrad", "SGD nesterov", "SGD fused", "Adagrad", "RMSprop", "Lion")
"""Each kind of state, and of kernel."""


def in_groups(model: nn.Module, name: str) -> Optimizer:
    """Three param groups: matrices, everything of the last block at twice the rate, and the other vectors."""
    kind, options = OPTIMIZERS[name]
    named = list(model.named_parameters())
    last = [p for n, p in named if n.startswith("blocks.2.")]
    matrices = [p for n, p in named if p.ndim == 2 and not n.startswith("blocks.2.")]
    others = [p for n, p in named if p.ndim != 2 and not n.startswith("blocks.2.")]
    groups = [{"params": matrices}, {"params": last, "lr": 2 * options["lr"]}, {"params": others}]
    return kind(groups, **options)


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("plan", ["zero3", "zero1"])
@pytest.mark.parametrize("name", mostly_long(OPTIMIZERS, *SHORT))
def test_every_optimizer_is_bitwise_itself_on_whole_parameters(name: str, plan: str) -> None:
    # torch's fused SGD cannot start the momentum of a parameter that gets its first gradient after others have
    case = Case(plan, 3, variant="tied" if name == "SGD fused" else "unused", steps=4)
    expected = on_whole_parameters(name, case.recipe)
    assert_parity(case, run_on_threads(case, make_optimizer=lambda model: in_groups(model, name)), expected)


@functools.cache
def on_whole_parameters(name: str, recipe: Recipe) -> list[Step]:
    trainer = Trainer(recipe, lambda model: in_groups(model, name), padded="fused" in name)
    return [trainer.step() for _ in range(recipe.steps)]


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    """It changes momenta as well as rates."""
    return OneCycleLR(optimizer, max_lr=[1e-2, 3e-2, 5e-3], total_steps=8)


def warm_up(optimizer: Optimizer) -> LRScheduler:
    return LinearLR(optimizer, start_factor=0.1, total_iters=3)


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("schedule", [one_cycle, warm_up])
@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("plan", ["zero3", "zero1"])
def test_schedulers_drive_the_same_groups(plan: str, built: str, schedule: Callable[[Optimizer], LRScheduler]) -> None:
    case = Case(plan, 2, steps=4)
    trainer = Trainer(case.recipe, lambda model: in_groups(model, "AdamW"))
    alone = schedule(trainer.optimizer)
    expected = []
    for _ in range(case.steps):
        expected.append(trainer.step())
        alone.step()

    def on_rank(rank: int) -> Any:
        made: list[LRScheduler] = []

        def make(model: nn.Module) -> Optimizer:
            optimizer = in_groups(model, "AdamW")
            if built == "before":
                made.append(schedule(optimizer))
            return optimizer

        runner = Runner(case, rank, make)
        if built == "after":
            made.append(schedule(runner.optimizer))
        runner.after_step = made[0].step
        return runner.run()

    assert_parity(case, run_in_threads(case.ranks, on_rank), expected)
    assert [group["lr"] for group in trainer.optimizer.param_groups] != [1e-2, 2e-2, 1e-2]
