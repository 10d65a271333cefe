"""An optimizer that is built after the model has been sharded."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import terrazzo as tz
from terrazzo.engine import ModelState, engine_of
from tests.engine.toys import Net, adamw, loss_of, on_ranks, train, train_alone
from tests.helpers.fake import fake_group
from tests.helpers.threads import exclusive


def grouped(parameters: Any) -> Optimizer:
    """Two groups that take turns in the order of registration."""
    given = list(parameters)
    groups = [[each for each in given if (each.dim() > 1) is decayed] for decayed in (True, False)]
    return torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.5}, {"params": groups[1]}], lr=1e-2)


@pytest.mark.cover(strength=1, turns=2)
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3", "zero2@cpu", "zero3@cpu-all"])
def test_training_is_that_of_one_process(plan: str) -> None:
    def body(rank: int) -> list[float]:
        with exclusive():
            torch.manual_seed(0)
            model: nn.Module = Net()
        tz.shard(model, None, plan)
        optimizer = grouped(model.parameters())
        assert tz.attach(model, optimizer) is optimizer
        return train(model, optimizer, 3, rank)

    torch.manual_seed(0)
    alone = Net()
    expected = train_alone(alone, grouped(alone.parameters()), 3, 2)
    for rank, losses in enumerate(on_ranks(2, body)):
        assert losses == pytest.approx([step[rank] for step in expected], rel=2e-6)


@pytest.mark.parametrize("late", [False, True])
def test_state_that_differs_between_ranks_is_refused(late: bool) -> None:
    def body(rank: int) -> None:
        with exclusive():
            torch.manual_seed(0)
            model: nn.Module = Net()
        optimizer, weights = adamw(model.parameters()), copy.deepcopy(model.state_dict())
        if rank:
            loss_of(model, torch.arange(12).reshape(2, 6)).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.load_state_dict(weights)
        if late:
            tz.shard(model, None, "zero3")
        put_on = tz.attach if late else tz.shard
        with pytest.raises(tz.BadInput, match="different things about: optimizer"):
            put_on(model, optimizer)

    on_ranks(2, body)


def test_state_that_the_optimizer_has_comes_along() -> None:
    with fake_group(1):
        torch.manual_seed(0)
        model: nn.Module = Net()
        reference = Net()
        reference.load_state_dict(model.state_dict())
        optimizers = [adamw(each.parameters()) for each in (model, reference)]
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            loss_of(each, torch.arange(12).reshape(2, 6)).backward()
            optimizer.step()
            optimizer.zero_grad()
        tz.shard(model, None, "zero1")
        tz.attach(model, optimizers[0])
        assert train(model, optimizers[0], 3, 0) == train(reference, optimizers[1], 3, 0)


@pytest.mark.parametrize("plan", ["zero1", "zero2@cpu"])
def test_a_released_optimizer_leaves_nothing_to_count_or_to_save(plan: str) -> None:
    with fake_group(2):
        model: nn.Module = Net()
        tz.shard(model, None, plan)
        engine, state = engine_of(model), ModelState(model)
        before = engine.bill, state.parameters()
        optimizer = tz.attach(model, adamw(model.parameters()))
        assert engine.bill != before[0] and state.parameters() != before[1]
        engine.release_optimizer()
        assert (engine.bill, state.parameters()) == before
        assert engine.param_groups() == [] and optimizer.param_groups


def test_what_cannot_be_attached_is_refused(tmp_path: Path) -> None:
    with fake_group(2):
        model: nn.Module = Net()
        with pytest.raises(tz.Misuse, match="not sharded"):
            tz.attach(model, adamw(model.parameters()))
        tz.shard(model, None, "zero1")
        with pytest.raises(tz.BadInput, match="not parameters of this model"):
            tz.attach(model, adamw(Net().parameters()))
        with pytest.raises(tz.BadInput, match="LBFGS"):
            tz.attach(model, torch.optim.LBFGS(model.parameters()))
        first = tz.attach(model, adamw(model.parameters()))
        with pytest.raises(tz.BadInput, match=r"in two optimizers.*del optimizer.*release_optimizer\(\)"):
            tz.attach(model, adamw(model.parameters()))
        again = r"AdamW has been sharded already.*Leave out the second call.*build a new AdamW"
        with pytest.raises(tz.BadInput, match=again):
            tz.attach(model, first)
        with pytest.raises(tz.BadInput, match=again):
            tz.shard(Net(), first, "zero1")
        engine_of(model).release_optimizer()
        with pytest.raises(tz.BadInput, match=again):
            tz.attach(model, first)
        second = tz.attach(model, adamw(model.parameters()))
        with pytest.raises(tz.Misuse, match="no longer drives"):
            first.step()
        del second
        gc.collect()
        tz.attach(model, adamw(model.parameters()))
        drives: nn.Module = Net()
        tz.shard(drives, None, "zero3@nvme", offload=tz.Offload(path=tmp_path, direct=False))
        with pytest.raises(tz.Misuse, match="state on nvme"):
            tz.attach(drives, adamw(drives.parameters()))


def test_what_one_rank_cannot_attach_all_refuse() -> None:
    def body(rank: int) -> str:
        with exclusive():
            model: nn.Module = Net()
        tz.shard(model, None, "zero1")
        given = Net() if rank == 1 else model
        with pytest.raises(tz.BadInput) as caught:
            tz.attach(model, adamw(given.parameters()))
        tz.attach(model, adamw(model.parameters()))
        return str(caught.value)

    first, second = on_ranks(2, body)
    assert "Rank 1 cannot do its part" in first and "not parameters of this model" in second


@pytest.mark.parametrize("plan", ["zero3@cpu", "zero1@cpu", "zero3@cpu-all"])
def test_clipped_gradients_that_no_step_takes_stay_clipped(plan: str) -> None:
    """As in plain PyTorch, where what belongs to no optimizer is clipped, and added to, like the rest."""
    torch.manual_seed(0)
    base, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), torch.randn(4, 8)

    def norms_of(model: Any, optimizer: Any, clip: Any) -> list[float]:
        found = []
        for _ in range(3):
            model(x).sum().backward()
            clip(model, 0.01)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(model[1].weight.grad.norm()))
        return found

    def body(rank: int) -> list[float]:
        model, _ = tz.shard(copy.deepcopy(base), None, plan)
        optimizer = tz.attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
        return norms_of(model, optimizer, tz.clip_grad_norm_)

    plain = copy.deepcopy(base)
    optimizer = torch.optim.SGD(plain[0].parameters(), lr=0.1)
    wanted = norms_of(plain, optimizer, lambda model, limit: nn.utils.clip_grad_norm_(model.parameters(), limit))
    for found in on_ranks(2, body):
        assert found == pytest.approx(wanted, rel=1e-4)
