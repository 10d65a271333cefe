"""Ranks with stages of a model: what the planner says from shapes alone, against what the engine holds and sends."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import terrazzo as tz
from terrazzo.engine import PRECISIONS, Plan, engine_of, stages_of
from terrazzo.planner.layout.placement import PlannedAxis
from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.peak import rank_peak
from terrazzo.planner.memory.states import state_terms
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.setup.checks import check
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.traffic.volumes import _collect, expected_exchanges
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from tests.helpers.cover import places
from tests.helpers.threads import run_in_threads

LENGTH = 16
RANKS_OF_A_HOST = 997
"""As no other test has, since what follows from it is remembered."""

SIZES = DecoderConfig(61, dim=32, layers=5, heads=4, kv_heads=2, ffn_dim=48, max_sequence_length=LENGTH)


@dataclass(frozen=True)
class Case:
    """Of a step of micro-batches of two sequences."""

    plan: str
    axes: tuple[tuple[str, int], ...] = (("pp", 2), ("dp_shard", 2))
    schedule: Any = "1f1b"
    chunks: int = 1
    micro_batches: int = 4
    precision: str = "fp32"
    tied: bool = False
    vocab: int = 61
    layers: int = 5

    @property
    def config(self) -> DecoderConfig:
        return replace(SIZES, tie_embeddings=self.tied, vocab_size=self.vocab, layers=self.layers)

    @property
    def setup(self) -> Setup:
        mesh = Mesh(**dict(self.axes))
        ranks = mesh.world_size
        return Setup(
            model_shape({"model_type": "terrazzo", **asdict(self.config)}),
            Cluster(Device("host", kind="cpu", per_node=RANKS_OF_A_HOST), ranks),
            Plan.named(self.plan),
            mesh,
            sequence=LENGTH,
            micro_batch=2,
            micro_batches=self.micro_batches,
            precision=PRECISIONS[self.precision],
            pipeline=self.schedule,
            virtual_stages=self.chunks,
        )


PP4 = (("pp", 4),)
CASES = [
    *(Case(plan) for plan in ("zero0", "zero1", "zero2", "zero3", "shard_grad_op", "zero3@cpu")),
    Case("hpz", (("pp", 2), ("dp_replicate", 2), ("dp_shard", 2)), precision="bf16"),
    Case("hybrid_shard", (("pp", 2), ("dp_replicate", 2), ("dp_shard", 2)), "gpipe"),
    Case("zero3", chunks=2, precision="bf16"),
    Case("zero1", chunks=2, micro_batches=6, tied=True),
    Case("zero3", schedule="zero_bubble"),
    Case("zero2", PP4, vocab=900),  # the head is the last stage by itself
    Case("zero1", PP4, tied=True, micro_batches=6),
    Case("zero3", PP4, layers=2),  # the embeddings are the first stage, and the last norm is before the head
    Case("zero3", (("pp", 2), ("tp", 2)), vocab=62),
    Case("zero2", (("pp", 2), ("cp", 2)), chunks=2),
]


@cache
def base(config: DecoderConfig) -> Decoder:
    return Decoder(config)


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if (p.ndim < 2) == small]} for small in (False, True)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


@dataclass(frozen=True)
class Rank:
    """What one has: names of its blocks, bytes of states by the bill, the most transient bytes, and bytes sent."""

    blocks: int
    states: dict[str, int]
    transient: int
    sent: dict[str, int]


def run(case: Case, rank: int) -> Rank:
    model: Any = copy.deepcopy(base(case.config))
    axes = {axis: size for axis, size in case.axes if axis != "dp_shard"}
    mesh = tz.mesh(**axes)  # type: ignore[arg-type]
    tz.parallelize(model, mesh, pipeline=tz.Pipeline(case.schedule, case.chunks))
    model, optimizer = tz.shard(
        model, torch.optim.AdamW(groups_of(model)), case.plan, units=[Block], mesh=mesh, precision=case.precision
    )
    own = LENGTH // dict(case.axes).get("cp", 1)
    tokens, positions = torch.zeros(2, own, dtype=torch.int64), torch.arange(own).expand(2, -1)
    engine = engine_of(model)
    for _ in range(2):  # the first sends shapes, too
        engine.traffic.reset()
        tz.step(model, [((tokens, positions), tokens)] * case.micro_batches, loss_of, denominator=1)
        optimizer.step()
        optimizer.zero_grad()
    engine.settle()
    bill, stages = engine.promise.memory(case.micro_batches), stages_of(model)
    assert bill.transient_bytes == engine.peak_transient_bytes and stages is not None
    return Rank(
        sum(name.startswith("blocks") for chunk in stages.chunks for name in chunk),
        vars(bill),
        engine.peak_transient_bytes,
        {name: sent for name, sent in engine.traffic.by_name().items() if sent and name != "control"},
    )


def promised(setup: Setup, stage: int) -> dict[str, int]:
    found = Counter(expected_exchanges(setup, stage))
    for move, links in _collect(setup, stage).values():
        if move.purpose == "data":
            found[move.kind] += round(sum(links.values()))
    return {name: sent for name, sent in found.items() if sent}


@pytest.mark.cover(strength=1, turns=3, case=lambda case: {**vars(case), "plan": places(case.plan)["weight"]})
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_of_stages_hold_and_send_what_was_promised(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, also what stages send each other. Ranks that are threads receive all at once."""
    monkeypatch.setattr(PlannedAxis, "receive_bytes", lambda self, full_bytes: full_bytes)
    setup = case.setup
    check(setup)
    base(case.config)  # before there are threads
    ranks = run_in_threads(setup.mesh.world_size, lambda rank: run(case, rank))
    beside = setup.mesh.world_size // setup.mesh.pp
    for stage in range(setup.mesh.pp):
        found = ranks[stage * beside + setup.mesh.tp - 1]
        assert {term.name: term.value for term in state_terms(setup, stage, "device")} == {
            "weights": found.states["weight_bytes"],
            "gradients": found.states["grad_bytes"],
            "master": found.states["master_bytes"],
            "moments": found.states["moments_bytes"],
        }
        assert found.sent == promised(setup, stage)
        assert found.transient == rank_peak(setup, stage, states_only=True).total
