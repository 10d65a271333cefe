"""What a step sends, against formulas written here from the table of plans alone.

Ψ is a unit's bytes. Along an axis of n ranks an all-gather or a reduce-scatter of Ψ sends Ψ(n-1)/n per rank, an
all-reduce twice that. The root unit keeps its weights between forward and backward and so is gathered once.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo.engine import PRECISIONS, Precision, Traffic, engine_of
from tests.engine.toys import EVERY_PLAN, TABLE_1D, TABLE_2D, Net, adamw, batch, loss_of, on_ranks, sharded, train
from tests.helpers.cover import places
from tests.helpers.fake import fake_group

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
DEPTH = 3


@dataclass
class Step:
    """A step's promised collectives: counts and bytes by kind."""

    sizes: tuple[int, ...]  # elements of each unit, root first
    shards: int
    replicas: int
    weight_itemsize: int = 4
    grad_itemsize: int = 4

    def __post_init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, kind: str, ranks: int, psi_bytes: int) -> None:
        if ranks > 1:
            self.count[kind] += 1
            self.bytes[kind] += psi_bytes * (ranks - 1) // ranks * (2 if kind == "all_reduce" else 1)

    def gather(self, numel: int, axes: str) -> None:
        """Weights of a unit that are split over `axes` ("", "S", "SR" or "R"), made whole: outermost cut last."""
        psi = numel * self.weight_itemsize
        if "R" in axes:
            self.add("all_gather", self.replicas, psi // self.shards)
        if "S" in axes:
            self.add("all_gather", self.shards, psi)

    def scatter(self, numel: int, axes: str) -> None:
        psi = numel * self.grad_itemsize
        if "S" in axes:
            self.add("reduce_scatter", self.shards, psi)
        if "R" in axes:
            self.add("reduce_scatter", self.replicas, psi // self.shards)

    def sum_whole(self, numel: int, axes: str) -> None:
        for axis, ranks in (("S", self.shards), ("R", self.replicas)):
            if axis in axes:
                self.add("all_reduce", ranks, numel * self.grad_itemsize)


def expected(plan: str, step: Step, micro_batches: int, local: bool) -> Step:
    """The formulas of the design, plan by plan, with no look at the engine's own table."""
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        for index, numel in enumerate(step.sizes):
            if plan in ("zero3", "shard_grad_op", "hpz"):
                step.gather(numel, "SR")
            if plan in ("hybrid_shard", "hybrid_shard_zero2", "hfsdp"):
                step.gather(numel, "S")
            if index > 0 and plan == "zero3":
                step.gather(numel, "SR")
            if index > 0 and plan in ("hybrid_shard", "hfsdp", "hpz"):
                step.gather(numel, "S")
            if last or not local:
                if plan in ("zero2", "zero3", "shard_grad_op", "hpz"):
                    step.scatter(numel, "SR")
                if plan in ("hybrid_shard", "hybrid_shard_zero2", "hfsdp"):
                    step.scatter(numel, "S")
    for numel in step.sizes:  # once a step
        if plan == "zero0":
            step.sum_whole(numel, "SR")
        if plan == "zero1":
            step.scatter(numel, "SR")
        if plan in ("hybrid_shard", "hybrid_shard_zero2"):
            step.sum_whole(numel // step.shards, "R")
        if plan == "hfsdp":
            step.add("reduce_scatter", step.replicas, numel // step.shards * step.grad_itemsize)
        if plan in ("zero1", "zero2"):
            step.gather(numel, "SR")
        if plan == "hfsdp":
            step.gather(numel, "R")
    return step


def one_step(model: Any, optimizer: Any, micro_batches: int, local: bool | None) -> Traffic:
    engine_of(model).traffic.reset()
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        with contextlib.nullcontext() if last else tz.accumulate(model, local=local):
            loss_of(model, batch(micro)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return engine_of(model).traffic


def by_kind(counter: Counter[str]) -> dict[str, int]:
    return {kind: counter[kind] for kind in KINDS}


Sizes = tuple[int, int]
"""(shards, replicas)"""


def sizes_for(plan: str, world_size: int) -> Sizes:
    return (world_size, 1) if plan in TABLE_1D else (world_size // 2, 2)


def shard_simulated(plan: str, sizes: Sizes, precision: str | Precision = "fp32", **options: Any) -> tuple[Any, Any]:
    shards, replicas = sizes
    mesh = None
    if plan in TABLE_2D:
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = Net(depth=DEPTH)
    return tz.shard(model, adamw(model.parameters()), plan, mesh=mesh, precision=precision, **options)


def promised(plan: str, sizes: Sizes, model: Any, micro_batches: int, local: bool, itemsizes: tuple[int, int]) -> Step:
    numels = tuple(unit.numel for unit in engine_of(model).units)
    assert len(numels) == 1 + DEPTH
    assert all(numel % (64 * math.prod(sizes)) == 0 for numel in numels)
    return expected(plan, Step(numels, *sizes, *itemsizes), micro_batches, local)


CASES = [(1, None), (3, True), (3, False)]


MESHES = [
    *((plan, (ranks, 1)) for plan in TABLE_1D for ranks in (2, 8, 1024)),
    *((plan, sizes) for plan in TABLE_2D for sizes in ((2, 1), (1, 2), (4, 2), (8, 128))),
]


@pytest.mark.cover(plan=places)
@pytest.mark.parametrize(("plan", "sizes"), MESHES)
def test_counts_and_bytes_follow_the_formulas(plan: str, sizes: Sizes) -> None:
    with fake_group(math.prod(sizes)):
        model, optimizer = shard_simulated(plan, sizes)
        one_step(model, optimizer, 1, None)
        for micro_batches, local in CASES:
            if local is False and plan in ("zero0", "zero1"):
                continue  # refused: whole gradients stay on every rank
            found = one_step(model, optimizer, micro_batches, local)
            wanted = promised(plan, sizes, model, micro_batches, bool(local), (4, 4))
            assert by_kind(found.count) == by_kind(wanted.count), (micro_batches, local)
            assert by_kind(found.bytes) == by_kind(wanted.bytes), (micro_batches, local)


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_the_engine_promises_what_it_sends(plan: str) -> None:
    with fake_group(8):
        model, optimizer = shard_simulated(plan, sizes_for(plan, 8))
        one_step(model, optimizer, 1, None)
        for micro_batches, local in [*CASES, (2, None)]:
            if local is False and plan in ("zero0", "zero1"):
                continue
            told = engine_of(model).promise.traffic(micro_batches=micro_batches, local=local)
            found = one_step(model, optimizer, micro_batches, local)
            assert by_kind(told.count) == by_kind(found.count), (micro_batches, local)
            assert by_kind(told.bytes) == by_kind(found.bytes), (micro_batches, local)


@pytest.mark.cover(plan=places)
@pytest.mark.parametrize(
    ("precision", "itemsizes"),
    [
        ("bf16", (2, 4)),
        ("bf16-pure", (2, 2)),
        (replace(PRECISIONS["fp16"], loss_scaling=None), (2, 4)),  # a step that an overflow skips gathers nothing
        (Precision(weight="bf16", compute="bf16", reduce="bf16"), (2, 2)),  # type: ignore[arg-type]
    ],
    ids=["bf16", "bf16-pure", "fp16", "bf16-on-the-wire"],
)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_bytes_follow_the_dtypes(plan: str, precision: Any, itemsizes: tuple[int, int]) -> None:
    with fake_group(8):
        model, optimizer = shard_simulated(plan, sizes_for(plan, 8), precision)
        one_step(model, optimizer, 1, None)
        found = one_step(model, optimizer, 2, True)
        wanted = promised(plan, sizes_for(plan, 8), model, 2, True, itemsizes)
        assert by_kind(found.count) == by_kind(wanted.count)
        assert by_kind(found.bytes) == by_kind(wanted.bytes)
        told = engine_of(model).promise.traffic(micro_batches=2, local=True)
        assert by_kind(told.bytes) == by_kind(found.bytes)


@pytest.mark.parametrize(
    ("plan", "multiple"), [("zero0", 2), ("zero1", 2), ("zero2", 2), ("shard_grad_op", 2), ("zero3", 3)]
)
def test_the_published_volumes(plan: str, multiple: int) -> None:
    """2Ψ(N-1)/N for DDP and ZeRO-1/2, 3Ψ(N-1)/N for ZeRO-3 (Rajbhandari et al., 2020), less one root gather."""
    world_size = 8
    with fake_group(world_size):
        model, optimizer = shard_simulated(plan, (world_size, 1))
        found = one_step(model, optimizer, 1, None)
        sizes = [unit.numel * 4 for unit in engine_of(model).units]
        root = sizes[0] if plan == "zero3" else 0
        volume = (multiple * sum(sizes) - root) * (world_size - 1) // world_size
        assert sum(by_kind(found.bytes).values()) == volume


def test_prefetching_changes_no_traffic() -> None:
    with fake_group(8):
        counts = []
        for prefetch in (0, 1, 2, 9):
            model, optimizer = shard_simulated("zero3", (8, 1), prefetch=prefetch)
            one_step(model, optimizer, 1, None)
            found = one_step(model, optimizer, 1, None)
            counts.append((by_kind(found.count), by_kind(found.bytes)))
        assert all(count == counts[0] for count in counts)


def test_evaluation_gathers_each_unit_once_and_reduces_nothing() -> None:
    with fake_group(8):
        model, optimizer = shard_simulated("zero3", (8, 1))
        one_step(model, optimizer, 1, None)
        engine_of(model).traffic.reset()
        with torch.no_grad():
            model(batch())
        assert by_kind(engine_of(model).traffic.count) == {
            "all_gather": 1 + DEPTH,
            "reduce_scatter": 0,
            "all_reduce": 0,
        }


def test_frozen_parameters_are_gathered_but_not_reduced() -> None:
    with fake_group(2):
        base = Net(depth=DEPTH)
        for block in base.blocks:
            for parameter in block.up.parameters():
                parameter.requires_grad_(False)
        model, optimizer = tz.shard(base, adamw([p for p in base.parameters() if p.requires_grad]), "zero3")
        found = one_step(model, optimizer, 1, None)
        units = engine_of(model).units
        trainable = sum(bucket.space.layout.numel for unit in units for bucket in unit.trainable())
        assert found.bytes["reduce_scatter"] == trainable * 4 // 2
        assert found.count["reduce_scatter"] == 1 + DEPTH
        assert found.count["all_gather"] == 1 + 2 * (2 * DEPTH)


@pytest.mark.parametrize("plan", ["zero0", "zero1"])
def test_whole_gradients_cannot_be_reduced_each_time(plan: str) -> None:
    with fake_group(2):
        model, _ = shard_simulated(plan, (2, 1))
        with pytest.raises(tz.BadInput, match="local=False"), tz.accumulate(model, local=False):
            pass


def test_control_messages_stay_small() -> None:
    with fake_group(8):
        model, optimizer = shard_simulated("zero3", (8, 1))
        for _ in range(2):  # the first step also agrees on the order of units
            found = one_step(model, optimizer, 1, None)
        assert found.bytes["control"] < 1024
        assert found.count["control"] == 3  # the ends of forward and backward, and who got gradients


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_control_messages_are_promised_with_the_flag_of_an_overflow(plan: str, local: bool) -> None:
    with fake_group(8):
        model, optimizer = shard_simulated(plan, (8, 1), "fp16")
        for _ in range(2):
            found = one_step(model, optimizer, 2, local)
        told = engine_of(model).promise.traffic(micro_batches=2, local=local)
        assert found.bytes["control"] == told.bytes["control"]


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_real_ranks_send_what_the_formulas_say(plan: str) -> None:
    base = Net(depth=DEPTH)

    def body(rank: int) -> tuple[Any, Any, Any]:
        model, optimizer = sharded(base, plan, 4)
        train(model, optimizer, 2, rank)
        found = one_step(model, optimizer, 3, True)
        return by_kind(found.count), by_kind(found.bytes), promised(plan, sizes_for(plan, 4), model, 3, True, (4, 4))

    for count, sent, wanted in on_ranks(4, body):
        assert count == by_kind(wanted.count)
        assert sent == by_kind(wanted.bytes)


def test_one_rank_sends_nothing() -> None:
    with fake_group(1):
        model, optimizer = shard_simulated("zero3", (1, 1))
        assert one_step(model, optimizer, 2, None).total_bytes == 0
        assert math.prod(unit.numel for unit in engine_of(model).units) > 0
