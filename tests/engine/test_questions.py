"""What other packages ask of an engine: each answer beside what a plain look at the model says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo.engine import ModelState, ShardedModule, ShardedOptimizer, engine_of
from terrazzo.engine.plan.moves import GradientFate
from terrazzo.integrations.fsdp2 import units
from tests.engine.toys import EVERY_PLAN, Net, adamw, batch, loss_of, on_ranks, sharded, train
from tests.helpers.cover import places


def test_what_there_is_to_save_of_each_parameter() -> None:
    base = Net()
    base.head.weight = torch.nn.Parameter(base.embed.weight.detach().clone())
    base.tied = base.embed  # a second name for one parameter
    base.blocks[0].requires_grad_(False)
    plain = copy.deepcopy(base)
    oracle = adamw(plain.parameters())
    train(plain, oracle, 1, rank=0)

    def run(rank: int) -> list[Any]:
        model, optimizer = tz.shard(copy.deepcopy(base), adamw, "zero3", precision="bf16")
        assert isinstance(model, ShardedModule) and isinstance(optimizer, ShardedOptimizer)
        assert [group for _, group in engine_of(model).param_groups()] == optimizer.param_groups
        return ModelState(model).parameters()

    for infos in on_ranks(2, run):
        parameters = dict(plain.named_parameters())
        assert {info.name for info in infos} == set(parameters)
        for info in infos:
            parameter = parameters[info.name]
            assert (info.shape, info.numel) == (tuple(parameter.shape), parameter.numel())
            assert info.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)
            assert info.group == 0
            kept = {kind: value.numel() for kind, value in oracle.state.get(parameter, {}).items()}
            assert {kind: numel for kind, (numel, _) in (info.states or {}).items()} == kept
            assert (info.states is None) == (not parameter.requires_grad)
        assert [info.names for info in infos if len(info.names) > 1] == [("embed.weight", "tied.weight")]


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_copies_are_what_several_ranks_hold(plan: str) -> None:
    def run(rank: int) -> tuple[bool, list[Any]]:
        model, optimizer = sharded(Net(), plan, 4)
        train(model, optimizer, 1, rank)
        engine = engine_of(model)
        held = [
            [(p.name, p.kind, p.start, p.stop, p.digest()) for p in pieces] for _, pieces in ModelState(model).copies()
        ]
        return units.has_replicas(engine), held

    ranks = on_ranks(4, run)
    has_replicas = plan == "zero0" or plan.startswith("hybrid_shard")
    assert all(found is has_replicas and bool(held) is has_replicas for found, held in ranks)
    for _, held in ranks:
        alike = sum(held == other for _, other in ranks)
        assert alike == (4 if plan == "zero0" or not has_replicas else 2)


@pytest.mark.parametrize("each", [False, True])
def test_micro_batches_are_summed_in_the_dtype_of_accumulate(each: bool) -> None:
    """256 + 1 is 256 in bf16, and 256 + 4 is 260."""

    def run(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        precision = tz.Precision(reduce=torch.bfloat16)
        model, _ = tz.shard(torch.nn.Linear(1, 1, bias=False), None, "hybrid_shard", mesh=mesh, precision=precision)
        for step, gradient in enumerate([256.0, 1.0, 1.0, 1.0, 1.0]):
            units.set_reduces(engine_of(model), step == 4, each=each)
            assert engine_of(model).schedule.fate is (GradientFate.FINISHED if step == 4 else GradientFate.LOCAL)
            model(torch.tensor([[gradient]])).sum().backward()
        return float(tz.clip_grad_norm_(model, 1e9))

    assert on_ranks(2, run) == [260.0, 260.0]


@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero3"])
def test_gradients_and_bytes(plan: str) -> None:
    def run(rank: int) -> None:
        model, optimizer = sharded(Net(), plan)
        engine = engine_of(model)
        assert units.reduces(engine) and not engine.gradients.finished
        with tz.accumulate(model):
            assert not units.reduces(engine)
            loss_of(model, batch(0, rank)).backward()
        assert units.reduces(engine) and not engine.gradients.finished
        loss_of(model, batch(1, rank)).backward()
        assert engine.gradients.finished
        optimizer.step()
        optimizer.zero_grad()
        assert not engine.gradients.finished
        bill = engine.bill
        assert engine.state_bytes() == bill.weight_bytes + bill.master_bytes + bill.moments_bytes
        assert engine.store.usage()["host_bytes"] == 0

    on_ranks(2, run)


def test_the_unit_of_a_module_and_its_weights_by_hand() -> None:
    base = Net()

    def run(rank: int) -> None:
        model, _ = sharded(base)
        engine, block = engine_of(model), model.blocks[1]
        unit = engine.units[2]
        assert unit.name == "blocks.1"
        units.gather(engine, block)()
        assert torch.equal(block.up.weight, base.blocks[1].up.weight)
        units.put_back(engine, block)
        assert not unit.weights.present
        units.gather(engine, block.up)()  # no unit of its own: nothing is gathered
        assert not unit.weights.present

    on_ranks(2, run)
