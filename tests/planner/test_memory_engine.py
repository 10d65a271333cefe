"""Memory against the engine's own bill, made from its buckets and its schedule before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo.engine import Offload, Plan, Precision, estimate
from terrazzo.engine.comm.host.columns import MANY_FAR, Columns
from terrazzo.engine.comm.host.gloo import GlooCollectives
from terrazzo.engine.formats import block_format
from terrazzo.engine.partition.unit_choice import find_units
from terrazzo.engine.partition.unit_members import partition
from terrazzo.engine.plan import error_feedback
from terrazzo.engine.plan.bucket_bytes import pending_bytes
from terrazzo.engine.plan.moves import GradientFate
from terrazzo.engine.plan.place import OFFLOADS, ON_DEVICE
from terrazzo.planner.layout.buckets import buckets
from terrazzo.planner.layout.placement import placement_of
from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.peak import rank_peak
from terrazzo.planner.memory.states import state_terms
from terrazzo.planner.memory.tiers import tier_terms
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.model.shapes import BlockShape, ModelShape, TensorShape, UnitShape
from terrazzo.planner.setup.optimizers import OPTIMIZERS
from terrazzo.planner.setup.setup import Setup
from terrazzo.train.model.decoder import Decoder, DecoderConfig
from tests.engine.toys import EVERY_PLAN, TABLE_2D
from tests.helpers.cover import places
from tests.helpers.fake import fake_group

PRECISIONS: dict[str, Precision] = {
    "fp32": Precision.named("fp32"),
    "bf16": Precision.named("bf16"),
    "bf16-pure": Precision.named("bf16-pure"),
    "fsdp": Precision(weight="fp32", compute="bf16", reduce="bf16", moments="bf16"),  # type: ignore[arg-type]
    "wide": Precision(master="fp64", moments="fp64", accumulate="fp64"),  # type: ignore[arg-type]
    "int8": Precision(weight="bf16", compute="bf16", moments="int8"),  # type: ignore[arg-type]
    "remainder": replace(Precision.named("bf16-pure"), moments="int8", rounding="remainder"),  # type: ignore[arg-type]
    "gathered in int8": Precision(weight="bf16", compute="bf16", gather="int8"),  # type: ignore[arg-type]
    "sums in int4": Precision(weight="bf16", compute="bf16", quantized_reduce="int4"),  # type: ignore[arg-type]
    "error feedback": Precision(weight="bf16", compute="bf16", quantized_reduce="int4", error_feedback=True),  # type: ignore[arg-type]
    "gathered in fp8": Precision(gather="fp8"),  # type: ignore[arg-type]
    "narrow wire": Precision(weight="bf16", compute="bf16", reduce="bf16"),  # type: ignore[arg-type]
}
ADAMW = OPTIMIZERS["adamw"]
OFFLOAD = Offload(path="/nowhere", block_mib=0.0625, depth=3)  # cells smaller than some units
SIZES = ((3, 2), (1, 1), (3, 0), (20, 1))
"""Layers and prefetch, by turns of precisions."""

MESHES = {
    "one rank": {"dp_shard": 1},
    "six": {"dp_shard": 6},
    "two by four": {"dp_replicate": 2, "dp_shard": 4},
    "with context": {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
}
CASES = [
    (mesh, plan) for mesh in MESHES for plan in EVERY_PLAN if plan not in TABLE_2D or "dp_replicate" in MESHES[mesh]
]


@pytest.fixture(autouse=True)
def _one_size_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's ranks are on CPUs, and the planner's on a device: what they decode at once is not the same."""
    for module in (block_format, error_feedback):
        monkeypatch.setattr(module, "tile_numel", lambda device: 1 << 16)


def decoder(layers: int, frozen: bool = False) -> nn.Module:
    with torch.device("meta"):
        model = Decoder(DecoderConfig(501, 64, layers, 4, 2, 176, 64, tie_embeddings=False))
    if frozen:
        parameters = dict(model.named_parameters())
        for name in ("embedding.weight", "blocks.0.attention.key.weight"):
            parameters[name].requires_grad_(False)
    return model


def shape_of(model: nn.Module, whole: Container[str] = ()) -> ModelShape:
    """Units and tensors as the engine itself finds them, equal neighbours as one row; `whole` matrices by name."""
    rows: list[tuple[tuple[TensorShape, ...], int]] = []
    for spec in partition(model, find_units(model, None)[0]):
        tensors = tuple(
            TensorShape(
                str(index),
                tuple(member.parameter.shape),
                "matrix",
                trainable=member.trainable,
                whole=member.name in whole,
                linear=member.is_matrix,
            )
            for index, member in enumerate(spec.members)
        )
        if rows and spec.name and rows[-1][0] == tensors:
            rows[-1] = (tensors, rows[-1][1] + 1)
        else:
            rows.append((tensors, 1))
    block = BlockShape(64, 4, 2, 16, 176)
    units = [UnitShape(str(index or ""), *row, block if index else None) for index, row in enumerate(rows)]
    return ModelShape("decoder", tuple(units))


def in_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """As the trainer has it: matrices are decayed, norms are not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = [p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups)


def of_matrices(model: nn.Module) -> tz.optim.Muon:
    """As the trainer has it: matrices, tables and heads, vectors."""
    matrices, others = tz.optim.hidden_matrices(model)
    tables, vectors = [each for each in others if each[1].ndim >= 2], [each for each in others if each[1].ndim < 2]
    return tz.optim.Muon(matrices, [{"params": tables}, {"params": vectors, "weight_decay": 0.0}])


def check_bill(
    model: nn.Module, mesh: str, plan: Plan, precision: Precision, prefetch: int, muon: bool = False
) -> None:
    sizes = MESHES[mesh]
    device_mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    tz.parallelize(model, device_mesh)
    offload = OFFLOAD if precision.narrow is None else replace(OFFLOAD, block_mib=1)
    options: dict[str, Any] = {"precision": precision, "prefetch": prefetch, "offload": offload.used_under(plan)}
    optimizer = of_matrices(model) if muon else in_two_groups(model)
    bill = estimate(model, optimizer, plan, mesh=device_mesh, **options)
    recipe, whole = (OPTIMIZERS["muon"], dict(tz.optim.hidden_matrices(model).matrices)) if muon else (ADAMW, {})
    cluster, shape = Cluster(Device("gpu"), 8), shape_of(model, whole)
    setup = Setup(shape, cluster, plan, Mesh(**sizes), optimizer=recipe, **options)
    host, disk = tier_terms(setup, 0)
    here = [term for term in host if term.name != "weights to the device"]  # which ranks on CPUs have no use for
    assert sum(term.value for term in here) == bill.host_bytes
    assert sum(term.value for term in disk) == bill.disk_bytes
    found = {term.name: term.value for term in state_terms(setup, 0, "device")}
    assert found == {
        "weights": bill.weight_bytes,
        "gradients": bill.grad_bytes,
        **({"residuals": bill.residual_bytes} if precision.error_feedback else {}),
        "master": bill.master_bytes,
        "moments": bill.moments_bytes,
    }
    assert rank_peak(setup, 0, states_only=True).total == bill.transient_bytes


@pytest.mark.filterwarnings("ignore:tz.Precision. .* nothing under plan")  # formats of messages, where none are sent
@pytest.mark.cover(turns=2, plan=places)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("mesh", "plan"), CASES)
def test_the_bill_to_the_byte(mesh: str, plan: str, precision: str) -> None:
    world_size = 1
    for size in MESHES[mesh].values():
        world_size *= size
    with fake_group(world_size):
        layers, prefetch = SIZES[[*PRECISIONS].index(precision) % len(SIZES)]
        check_bill(decoder(layers), mesh, Plan.named(plan), PRECISIONS[precision], prefetch)
        check_bill(decoder(3, frozen=True), mesh, Plan.named(plan), PRECISIONS[precision], 1)


@pytest.mark.filterwarnings("ignore:.*change.? nothing")  # where a plan sends nothing in blocks
@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fsdp", "in blocks"])
@pytest.mark.parametrize(("mesh", "plan"), CASES)
def test_the_bill_of_whole_matrices_to_the_byte(mesh: str, plan: str, name: str) -> None:
    in_blocks = replace(Precision.named("bf16"), gather="int8", quantized_reduce="int4")  # type: ignore[arg-type]
    precision = in_blocks if name == "in blocks" else PRECISIONS[name]
    with fake_group(math.prod(MESHES[mesh].values())):
        for layers, prefetch in ((1, 1), (3, 2)):
            check_bill(decoder(layers), mesh, Plan.named(plan), precision, prefetch, muon=True)
        check_bill(decoder(3, frozen=True), mesh, Plan.named(plan), precision, 1, muon=True)


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("precision", ["fp32", "fsdp"])
@pytest.mark.parametrize("tiers", OFFLOADS)
@pytest.mark.parametrize(("mesh", "plan"), [("six", "zero3"), ("two by four", "hfsdp"), ("one rank", "zero1")])
def test_the_bill_of_whole_matrices_away_from_the_device_too(mesh: str, plan: str, tiers: str, precision: str) -> None:
    with fake_group(math.prod(MESHES[mesh].values())):
        for layers, prefetch in ((1, 1), (3, 2)):
            moved = Plan.named(plan).on(**OFFLOADS[tiers])
            check_bill(decoder(layers), mesh, moved, PRECISIONS[precision], prefetch, muon=True)


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("form", ["nf4", "nf4-double"])
@pytest.mark.parametrize(("mesh", "plan"), CASES)
def test_the_bill_of_packed_weights_to_the_byte(mesh: str, plan: str, form: str, name: str) -> None:
    precision = replace(Precision.named(name), frozen=form)  # type: ignore[arg-type]
    with fake_group(math.prod(MESHES[mesh].values())):
        for layers, prefetch, tiers in ((2, 1, {}), (12, 2, {}), (3, 0, {}), (3, 1, OFFLOADS["cpu-all"])):
            model = decoder(layers)
            for block in model.blocks:
                for layer in block.modules():
                    if isinstance(layer, nn.Linear):
                        layer.weight.requires_grad_(False)
            check_bill(model, mesh, Plan.named(plan).on(**tiers), precision, prefetch)


class Stack(nn.Module):
    """Blocks of which nobody knows what they compute."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(16))
        self.head = nn.Linear(256, 64) if head else nn.Identity()


@pytest.mark.parametrize("head", [True, False])
def test_a_unit_whose_block_is_not_known_is_no_root(head: bool) -> None:
    with fake_group(8), torch.device("meta"):
        model = Stack(head)
        bill = estimate(model, in_two_groups(model), "zero3", precision="fp32")
    setup = Setup(model_shape(model), Cluster(Device("gpu"), 8), Plan.named("zero3"), Mesh(dp_shard=8))
    assert not any(unit.block for unit in setup.model.units)
    assert rank_peak(setup, 0, states_only=True).total == bill.transient_bytes


TIERS: dict[str, dict[str, str]] = {
    **OFFLOADS,
    "weights alone": {"weight": "cpu"},
    "weights alone in files": {"weight": "nvme"},
    "gradients alone": {"grad": "cpu"},
    "all in files": {"weight": "nvme", "grad": "nvme", "optim": "nvme"},
    "two tiers": {"weight": "cpu", "grad": "cpu", "optim": "nvme"},
    "shares": {"weight": "cpu:0.5", "grad": "cpu:0.7", "optim": "nvme:0.3,cpu:0.4"},
    "a share too small": {"optim": "cpu:0.01"},
}


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize(("mesh", "plan"), [case for case in CASES if case[0] in ("one rank", "two by four")])
def test_the_bill_of_every_tier_to_the_byte(mesh: str, plan: str, tiers: str) -> None:
    some = ("fp32", "bf16", "int8", "remainder", "gathered in int8")
    precision = some[(list(TIERS).index(tiers) + list(CASES).index((mesh, plan))) % len(some)]
    placed = Plan.named(plan).on(**TIERS[tiers])
    with fake_group(8 if mesh == "two by four" else 1):
        check_bill(decoder(12), mesh, placed, PRECISIONS[precision], 1)
        check_bill(decoder(3, frozen=True), mesh, placed, PRECISIONS[precision], 0)


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_no_rank_has_more_than_the_first_but_for_step_counts(rank: int) -> None:
    """Padding at the end of a unit lies on the last ranks, and has no moments."""
    model: Any = decoder(3)
    bills = []
    for index in (0, rank):
        with fake_group(8, index):
            bills.append(estimate(model, in_two_groups(model), "zero3", precision="bf16"))
    first, other = bills
    assert other.weight_bytes == first.weight_bytes
    assert other.moments_bytes <= first.moments_bytes + 4 * len(shape_of(model).units) * 3


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 8), (8, 4), (3, 1), (48, 8), (40, 1), (44, 8)])
def test_what_gloo_receives(ranks: int, per_node: int) -> None:
    """Blocks from ranks of the same host, whole chunks from others; of many others by columns, if hosts are alike."""
    collectives: Any = object.__new__(GlooCollectives)
    collectives.rank, collectives.size = 0, ranks
    near, many = min(ranks, per_node), ranks - per_node > MANY_FAR
    width = 1 if many and ranks % per_node else near
    rows = [list(range(first, first + width)) for first in range(0, ranks, width)]
    collectives._columns = Columns(0, rows, []) if many else None
    collectives._near = dict.fromkeys(range(1, width))
    collectives._far = list(range(width, ranks))
    host = Device("host", kind="cpu", per_node=per_node)
    unit = UnitShape("", (TensorShape("matrix", (2048, 1024)),))
    setup = Setup(ModelShape("one", (unit,)), Cluster(host, ranks), Plan.named("zero3"), Mesh(dp_shard=ranks))
    (bucket,) = buckets(unit, placement_of(setup, ON_DEVICE))
    (move,) = bucket.sums.last.partial
    assert move.received_bytes == collectives.receive_bytes(pending_bytes(bucket, GradientFate.REDUCED))
