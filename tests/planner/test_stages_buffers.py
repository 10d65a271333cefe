"""Copies of buffers that a step in stages keeps: what the planner says, what the bill says, and what is allocated."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import terrazzo as tz
from terrazzo.engine import Plan, engine_of, estimate
from terrazzo.planner.layout.placement import PlannedAxis
from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.peak import rank_peak
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.setup.setup import Setup
from tests.helpers.cover import in_turns
from tests.helpers.threads import run_in_threads

WIDTH, BLOCKS, SCALES = 8, 4, 24
RANKS_OF_A_HOST = 983
"""As no other test has, since what follows from it is remembered."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.norm(self.linear(x))
        return mixed


class Tower(nn.Module):
    """Has statistics in each block, and a buffer that is in no stage."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.register_buffer("scales", torch.ones(SCALES, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Copies(TorchDispatchMode):
    """Notes the storages into which buffers of a model are copied."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.buffers = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
        self.made: list[tuple[weakref.ref[Any], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and args[0].untyped_storage().data_ptr() in self.buffers:
            self.made.append((weakref.ref(result), result.untyped_storage().nbytes()))
        return result

    @property
    def live_bytes(self) -> int:
        return sum(count for made, count in self.made if made() is not None)


OF_A_BLOCK = 2 * WIDTH * 4 + 8
"""Mean and variance in fp32, and the number of batches in int64."""


@pytest.mark.parametrize(
    ("schedule", "chunks", "plan"), in_turns([("1f1b", 1), ("1f1b", 2), ("gpipe", 1)], ["zero1", "zero3"])
)
def test_copies_of_buffers_are_in_the_plan_and_in_the_bill(
    plan: str, schedule: Any, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlannedAxis, "receive_bytes", lambda self, full_bytes: full_bytes)
    base = Tower()
    tokens = torch.arange(6) % 11

    def body(rank: int) -> tuple[int, int, set[int]]:
        model: Any = copy.deepcopy(base)
        mesh = tz.mesh(pp=2, device="cpu")
        names = ["table", "blocks.*", "norm", "head"]
        tz.parallelize(model, mesh, pipeline=tz.Pipeline(schedule, chunks, line=names))
        planned = estimate(model, lambda p: torch.optim.SGD(p, lr=0.1), plan, units=[Block], mesh=mesh)
        model, optimizer = tz.shard(model, lambda p: torch.optim.SGD(p, lr=0.1), plan, units=[Block], mesh=mesh)
        engine, in_forwards = engine_of(model), set[int]()
        with Copies(model) as copies:
            model.register_forward_pre_hook(lambda *_: in_forwards.add(copies.live_bytes))
            tz.step(model, [(tokens, tokens)] * 4, lambda logits, _: logits.square().sum())
            assert copies.live_bytes == 0
        optimizer.step()
        engine.settle()
        assert planned.transient_bytes == engine.bill.transient_bytes
        return engine.promise.memory(4).transient_bytes, engine.peak_transient_bytes, in_forwards

    ranks = run_in_threads(4, body)
    setup = Setup(
        model_shape(Tower()),
        Cluster(Device("host", kind="cpu", per_node=RANKS_OF_A_HOST), 4),
        Plan.named(plan),
        Mesh(pp=2, dp_shard=2),
        micro_batch=1,
        micro_batches=4,
        pipeline=schedule,
        virtual_stages=chunks,
    )
    for stage in range(2):
        bill, measured, copied = ranks[2 * stage]
        assert copied == {SCALES * 8 + BLOCKS // 2 * OF_A_BLOCK}
        assert bill == measured == rank_peak(setup, stage, states_only=True).total
