"""Copies of one state on several ranks: equal after training, and a flipped bit is found with the rank that has it."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo.checkpoint import check_replicas
from terrazzo.config import config_from_dict
from terrazzo.engine import engine_of
from terrazzo.errors import Diverged
from terrazzo.train.loop import TrainingLoop
from tests.engine.toys import EVERY_PLAN, Net, adamw, on_ranks, sharded, train
from tests.helpers.cover import places
from tests.train.test_run_edges import on_ranks_of_a_run
from tests.train.test_session import StopAfter, config_in

NAMES = {"weight": "weight", "moment": "exp_avg_sq"}
COPIES = {"zero0": (4, "rank 2 differs from those of the others"), "hybrid_shard": (2, "ranks 0, 2 differ from each")}


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_training_leaves_copies_equal(plan: str, precision: str) -> None:
    base = Net()

    def body(rank: int) -> None:
        model, optimizer = sharded(base, plan, 4, precision=precision)
        check_replicas(model)
        train(model, optimizer, 2, rank)
        check_replicas(model)

    on_ranks(4, body)


@pytest.mark.parametrize("plan", COPIES)
@pytest.mark.parametrize("state", NAMES)
def test_a_flipped_bit_is_found_and_its_rank_named(plan: str, state: str) -> None:
    base = Net()

    def body(rank: int) -> str:
        model, optimizer = sharded(base, plan, 4)
        train(model, optimizer, 1, rank)
        bucket = engine_of(model).units[1].buckets[0]
        if rank == 2:
            data = bucket.master.data if state == "weight" else moment_of(model)  # type: ignore[attr-defined]
            data.view(torch.int32)[5] ^= 1 << 20
        with pytest.raises(Diverged) as caught:
            check_replicas(model)
        return str(caught.value)

    said = on_ranks(4, body)
    count, who = COPIES[plan]
    assert len(set(said)) == 1
    assert f"blocks.0.up.weight, {NAMES[state]}, elements 0 to" in said[0]
    assert f"of {count} copies" in said[0] and who in said[0]


@pytest.mark.parametrize("state", ["average", "error_feedback", "outer_momentum"])
def test_a_flipped_bit_of_what_few_models_have_is_found(state: str) -> None:
    """Ranks that differ in `dp_replicate` alone have residuals of their own, and the two of a group the same."""
    base = Net()
    options: dict[str, Any] = {
        "average": {},
        "error_feedback": {"precision": replace(tz.Precision(), quantized_reduce="int8", error_feedback=True)},
        "outer_momentum": {"diloco": tz.DiLoCo(1)},
    }[state]

    def body(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        model, optimizer = tz.shard(copy.deepcopy(base), adamw, "zero0", mesh=mesh, **options)
        if state == "average":
            tz.EMA(model)
        train(model, optimizer, 2, rank)
        check_replicas(model)
        if rank == 2:
            engine = engine_of(model)
            bucket: Any = next(each for each in engine.units[1].buckets if each.spec.in_blocks)
            resting = {
                "average": lambda: engine.averages[bucket],
                "error_feedback": lambda: bucket.gradient.residuals[0].committed,
                "outer_momentum": lambda: bucket.outer[1],
            }[state]()
            resting.data.view(torch.uint8)[5] ^= 1
        with pytest.raises(Diverged) as caught:
            check_replicas(model)
        return str(caught.value)

    said = on_ranks(4, body)
    assert len(set(said)) == 1
    assert re.search(rf"^blocks\.0\.\S+, {state}(@1)?, elements .*: of . copies .*rank.* 2", said[0])


def moment_of(model: torch.nn.Module) -> torch.Tensor:
    """Of the unit whose weights the test changes."""
    engine = engine_of(model)
    bucket = engine.units[1].buckets[0]
    (driver,) = engine.drivers
    segment = next(segment for segment in driver.segments if segment.bucket is bucket)
    moment: torch.Tensor = driver.optimizer.state[segment.parameter]["exp_avg_sq"]
    return moment


def test_what_is_split_over_all_ranks_has_no_copies() -> None:
    base = Net()

    def body(rank: int) -> None:
        model, _ = sharded(base, "zero3", 2)
        engine_of(model).units[1].buckets[0].master.data.fill_(rank)  # type: ignore[attr-defined]
        check_replicas(model)

    on_ranks(2, body)


def test_a_run_compares_them_when_it_is_asked_to(tmp_path: Path) -> None:
    sections = {"plan": {"name": "zero0"}, "batch": {"micro_batch": 1}, "train": {"check_replicas_every": 2}}

    def work(session: object) -> str:
        trainer = TrainingLoop(session, StopAfter(None))  # type: ignore[arg-type]
        if trainer.session.ranks.rank == 1:
            trainer.session.model.embedding.weight.data[0, 0] += 1  # type: ignore[union-attr, operator]
        with pytest.raises(Diverged) as caught:
            trainer.run()
        return str(caught.value)

    said = on_ranks_of_a_run(2, config_in(tmp_path, **sections), work)
    assert said[0] == said[1]
    assert "embedding.weight, weight" in said[0]
    assert "1 checkpoint saved so far, and nothing was known to be right before, is put aside as suspect" in said[0]
    (path,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert path.name.startswith("step-00000001.suspect-")
    assert config_from_dict({}).train.check_replicas_every is None
