"""Several sharded models in one program against the same program in one process of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import terrazzo as tz
from terrazzo.engine import data_mesh
from tests.engine.toys import Block, assert_close, full_parameters, mesh_for, on_ranks

WIDTH = 8
Pair = tuple[Any, Any]


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 13), Block(), nn.Linear(13, WIDTH))


def judge() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 13), Block(), nn.Linear(13, 1))


def optimizers(one: nn.Module, other: nn.Module) -> Pair:
    return AdamW(one.parameters(), lr=1e-2), SGD(other.parameters(), lr=0.05, momentum=0.9)


def noise(step: int, ranks: Sequence[int], width: int) -> Tensor:
    return torch.cat([torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + r)) for r in ranks])


def adversaries(models: Pair, steppers: Pair, ranks: Sequence[int], first: int, last: int) -> None:
    """The generator learns through the judge, so that one backward goes through both models."""
    (maker, critic), (by_maker, by_critic) = models, steppers
    for step in range(first, last):
        real, fake = critic(noise(100 + step, ranks, WIDTH)), critic(maker(noise(step, ranks, 3)).detach())
        loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        (loss + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))).backward()
        torch.nn.utils.clip_grad_norm_(critic.parameters(), 0.1)
        by_critic.step()
        by_critic.zero_grad()
        judged = critic(maker(noise(step, ranks, 3)))
        F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged)).backward()
        by_maker.step()
        by_maker.zero_grad()
        by_critic.zero_grad()


def actor_and_critic(models: Pair, steppers: Pair, ranks: Sequence[int], first: int, last: int) -> None:
    """Two losses of one rollout, in one backward; both step."""
    actor, critic = models
    for step in range(first, last):
        acted = actor(noise(step, ranks, 3))
        value = critic(acted.detach())
        policy = (acted.log_softmax(-1)[:, 0] * value.detach()[:, 0]).mean()
        (policy + (value - acted.detach().mean(1, keepdim=True)).square().mean()).backward()
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()


def distillation(models: Pair, steppers: Pair, ranks: Sequence[int], first: int, last: int) -> None:
    """The second model is frozen, and teaches."""
    student, teacher = models
    for step in range(first, last):
        x = noise(step, ranks, 3)
        with torch.no_grad():
            wanted = teacher(x)
        (student(x) - wanted).square().mean().backward()
        steppers[0].step()
        steppers[0].zero_grad()


PROGRAMS = {"adversaries": adversaries, "actor and critic": actor_and_critic, "distillation": distillation}


def pair_for(program: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return (generator(), generator().requires_grad_(False)) if program == "distillation" else (generator(), judge())


@pytest.mark.parametrize(
    ("program", "plans"),
    [
        pytest.param("adversaries", ("zero3", "zero3"), marks=pytest.mark.long),
        ("adversaries", ("zero3@cpu", "zero2")),
        pytest.param("actor and critic", ("hpz", "hfsdp"), marks=pytest.mark.long),
        ("actor and critic", ("zero1", "zero3")),
        pytest.param("distillation", ("zero2", "zero3"), marks=pytest.mark.long),
        ("distillation", ("zero3@cpu", "hpz")),
    ],
)
def test_each_follows_plain_torch_and_goes_on_from_one_folder(
    program: str, plans: tuple[str, str], tmp_path: Path
) -> None:
    base, run = pair_for(program), PROGRAMS[program]
    alone = copy.deepcopy(base)
    trained = [model for model in alone if next(model.parameters()).requires_grad]
    run(alone, optimizers(*alone), [0, 1, 2, 3], 0, 4)

    def sharded(given: Pair) -> tuple[Pair, Pair]:
        models = copy.deepcopy(given)
        made = optimizers(*models)
        for model, optimizer, plan in zip(models, made, plans, strict=True):
            frozen = not next(model.parameters()).requires_grad
            tz.shard(model, None if frozen else optimizer, plan, units=[Block], mesh=mesh_for(plan, 4))
        return models, made

    def body(rank: int) -> list[dict[str, Tensor]]:
        models, steppers = sharded(base)
        run(models, steppers, [rank], 0, 2)
        for name, model, stepper in zip("ab", models[: len(trained)], steppers, strict=False):
            tz.checkpoint.save(tmp_path / "step-00000002" / name, model, stepper, {"step": 2})
        models, steppers = sharded((*pair_for(program)[: len(trained)], *base[len(trained) :]))
        for name, model, stepper in zip("ab", models[: len(trained)], steppers, strict=False):
            assert tz.checkpoint.load(tmp_path / "step-00000002" / name, model, stepper) == {"step": 2}
        run(models, steppers, [rank], 2, 4)
        return [full_parameters(model) for model in models]

    for found in on_ranks(4, body):
        for parameters, model in zip(found, alone, strict=True):
            assert_close(parameters, dict(model.named_parameters()), 5e-6)


def test_models_share_the_mesh_and_its_groups() -> None:
    def body(rank: int) -> None:
        before = len(dist.distributed_c10d._world.pg_map)
        first = data_mesh("cpu", 2, 2)
        made = len(dist.distributed_c10d._world.pg_map)
        assert data_mesh("cpu", 2, 2) is first and data_mesh("cpu", 4) is not first
        for _ in range(2):
            tz.shard(generator(), None, "hfsdp", mesh=data_mesh("cpu", 2, 2))
            tz.shard(generator(), None, "zero3")
        assert made > before and len(dist.distributed_c10d._world.pg_map) == made

    on_ranks(4, body)
    on_ranks(4, body)  # of another default group: the mesh of the first is not taken
