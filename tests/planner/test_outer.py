"""What an outer step keeps, needs and sends, by the planner and by the engine, to the byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

import terrazzo as tz
from terrazzo.engine import Offload, Plan, engine_of
from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.outer_memory import outer_held_bytes
from terrazzo.planner.memory.peak import rank_peak
from terrazzo.planner.memory.states import state_terms
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.traffic.outer_moves import outer_moves
from terrazzo.planner.traffic.volumes import traffic_of
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from tests.helpers.fake import fake_group

SIZES = DecoderConfig(64, 32, 3, 4, 2, 48, 16)
MESHES = {
    "data": {"dp_replicate": 2, "dp_shard": 2},
    "tp": {"dp_replicate": 3, "dp_shard": 2, "tp": 2},
    "alone": {"dp_replicate": 1, "dp_shard": 2},
}

STREAMS = {
    "blocking": {},
    "fragments": {"fragments": 3, "delay": 1, "meet_every": 10},
    "by turns": {"fragments": 2, "meet_every": 15},
}


@pytest.mark.cover
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("traffic", ["fp32", "int8"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("plan", ["zero0", "zero2", "zero3", "zero3@cpu"])
def test_the_planner_has_the_bytes_of_the_engine(plan: str, mesh: str, traffic: Any, streams: str) -> None:
    sizes, settings = MESHES[mesh], tz.DiLoCo(5, traffic=traffic, **STREAMS[streams])
    with fake_group(Mesh(**sizes).world_size):
        with torch.device("meta"):
            model = Decoder(SIZES)
        made = tz.mesh(**sizes)
        if "tp" in sizes:
            tz.parallelize(model, made)
        model, _ = tz.shard(model, torch.optim.AdamW, plan, mesh=made, units=[Block], diloco=settings)
        engine = engine_of(model)
        bill, sent, outer = engine.bill, engine.promise.traffic().bytes, engine.promise.outer_traffic().bytes
    setup = Setup(
        model_shape({"model_type": "terrazzo", **asdict(SIZES)}),
        Cluster(Device("gpu"), Mesh(**sizes).world_size),
        Plan.named(plan),
        Mesh(**sizes),
        sequence=16,
        offload=Offload().used_under(Plan.named(plan)),
        diloco=settings,
    )
    values = {term.name: term.value for term in state_terms(setup, 0, "device")}
    assert values["outer"] == bill.outer_bytes
    assert bool(bill.outer_bytes) is ("cpu" not in plan)
    assert values["weights"] + values["master"] == bill.weight_bytes + bill.master_bytes
    host = sum(term.value for term in state_terms(setup, 0, "cpu"))
    assert host == (bill.host_bytes if "cpu" in plan else 0)
    assert bill.transient_bytes == rank_peak(setup, 0, states_only=True).total >= outer_held_bytes(setup, 0) > 0
    moved = Counter[str]()
    for move, per_step, _ in outer_moves(setup, 0):
        moved[move.kind] += round(move.sent_bytes) * round(per_step * settings.round_steps)
    assert moved == Counter({kind: count for kind, count in outer.items() if kind != "control"})
    planned = traffic_of(setup)
    per_step = {
        kind: sum(
            term.value
            for term in planned.collectives
            if term.name.startswith(kind) and term.purpose in ("data", "outer")
        )
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    for kind, count in per_step.items():
        assert count == pytest.approx(sent[kind] + outer[kind] / settings.round_steps)


def test_masters_with_a_remainder_are_gathered_apart_on_the_device_too() -> None:
    """No collective writes to two halves. So many ranks share an outer step that its message is less than a bucket."""
    remainder = replace(tz.Precision.named("bf16-pure"), moments="int8", rounding="remainder")
    sizes, settings = {"dp_replicate": 2, "dp_shard": 32}, tz.DiLoCo(5)
    with fake_group(64):
        with torch.device("meta"):
            model = Decoder(SIZES)
        model, _ = tz.shard(
            model,
            torch.optim.AdamW,
            "zero0",
            mesh=tz.mesh(**sizes),
            units=[Block],
            diloco=settings,
            precision=remainder,
        )
        largest = max(bucket.exact.nbytes for bucket in engine_of(model).buckets())
    shape, plan = model_shape({"model_type": "terrazzo", **asdict(SIZES)}), Plan.named("zero0")
    cluster, mesh = Cluster(Device("gpu"), 64), Mesh(**sizes)
    setup = Setup(shape, cluster, plan, mesh, sequence=16, diloco=settings, precision=remainder)
    assert outer_held_bytes(setup, 0) == largest
    assert outer_held_bytes(replace(setup, precision=tz.Precision.named("bf16")), 0) < largest
