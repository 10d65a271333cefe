"""Traffic against the engine's own count, and against published volumes and formulas worked out by hand."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo.engine import PRECISIONS, Plan, Precision, engine_of
from terrazzo.engine.plan.place import ON_DEVICE
from terrazzo.planner.figures import TrafficFigures
from terrazzo.planner.layout.buckets import buckets
from terrazzo.planner.layout.placement import placement_of
from terrazzo.planner.machine.devices import Cluster, Device, device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.model.adapters import with_ends, with_frozen
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.model.shapes import BlockShape, ModelShape, TensorShape, UnitShape
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.optimizers import OPTIMIZERS
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.traffic.volumes import matrix_moves, repetitions, traffic_of
from tests.engine.toys import EVERY_PLAN, TABLE_1D, TABLE_2D, Net, adamw, batch, loss_of
from tests.helpers.cover import places
from tests.helpers.fake import fake_group

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
MIXED: dict[str, Precision] = {
    **PRECISIONS,
    "fp16": replace(PRECISIONS["fp16"], loss_scaling=None),  # a step that an overflow skips gathers nothing
    "fp32 weights": Precision(weight="fp32", compute="bf16", reduce="bf16"),  # type: ignore[arg-type]
    "fp16 wire": Precision(weight="bf16", compute="bf16", reduce="fp16", accumulate="bf16"),  # type: ignore[arg-type]
}


def shape_of(model: Any) -> ModelShape:
    """What the engine's units hold, as the planner's shapes."""
    units = []
    for unit in engine_of(model).units:
        tensors = tuple(
            TensorShape(slot.name, slot.shape, "vector", trainable=bucket.spec.trainable)
            for bucket in unit.buckets
            for slot in bucket.slots
        )
        units.append(UnitShape(unit.name, tensors))
    return ModelShape("toy", tuple(units))


def step_traffic(model: Any, optimizer: Any, micro_batches: int, local: bool | None) -> Counter[str]:
    """What the engine really sends in one step, by kind."""
    engine_of(model).traffic.reset()
    for micro in range(micro_batches):
        last = micro == micro_batches - 1
        with contextlib.nullcontext() if last else tz.accumulate(model, local=local):
            loss_of(model, batch(micro)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return Counter({kind: engine_of(model).traffic.bytes[kind] for kind in KINDS})


def planned(setup: Setup) -> Counter[str]:
    found: Counter[str] = Counter()
    for term in traffic_of(setup).collectives:
        found[term.name.split()[0]] += term.value  # type: ignore[assignment]
    return Counter({kind: found[kind] for kind in KINDS})


def setup_of(model: Any, plan: str, mesh: Mesh, precision: Precision, micro_batches: int, local: bool | None) -> Setup:
    cluster = Cluster(Device("fake", "cpu"), mesh.world_size)
    recipe = {"precision": precision, "micro_batches": micro_batches, "accumulate_locally": bool(local)}
    return Setup(shape_of(model), cluster, Plan.named(plan), mesh, **recipe)  # type: ignore[arg-type]


def device_mesh(mesh: Mesh) -> Any:
    sizes = (mesh.dp_replicate, mesh.cp, mesh.dp_shard)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "cp", "dp_shard"))


def sharing(model: Any, mesh: Any) -> Any:
    """A model that says of itself that it can share sequences."""
    model.use_context = lambda context: None
    return tz.parallelize(model, mesh)


STEPS: list[tuple[int, bool | None]] = [(1, None), (2, None), (4, True), (3, False)]


@pytest.mark.cover(strength=1, turns=2, plan=places)  # pairs meet in test_engine_truth
@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_bytes_are_those_of_the_engine(plan: str, precision: str) -> None:
    mesh = Mesh(dp_shard=8) if plan in TABLE_1D else Mesh(dp_shard=4, dp_replicate=2)
    with fake_group(8):
        model = Net(depth=3)
        model, optimizer = tz.shard(
            model, adamw(model.parameters()), plan, mesh=device_mesh(mesh), precision=MIXED[precision]
        )
        step_traffic(model, optimizer, 1, None)
        for micro_batches, local in STEPS:
            if local is False and plan in ("zero0", "zero1"):
                continue  # refused: whole gradients stay on every rank
            setup = setup_of(model, plan, mesh, MIXED[precision], micro_batches, local)
            assert planned(setup) == step_traffic(model, optimizer, micro_batches, local), (micro_batches, local)


@pytest.mark.cover(plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
@pytest.mark.parametrize("mesh", [Mesh(1, 2, 4, 3), Mesh(1, 1, 128, 8), Mesh(1, 3, 2, 1), Mesh(1, 128, 8, 1), Mesh()])
def test_bytes_are_what_the_engine_expects_on_any_mesh(plan: str, mesh: Mesh) -> None:
    with fake_group(mesh.world_size):
        model = Net(width=29, depth=2)
        for parameter in model.blocks[0].parameters():
            parameter.requires_grad_(False)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        ranks = device_mesh(mesh)
        model, _ = tz.shard(sharing(model, ranks), adamw(trainable), plan, mesh=ranks, precision="bf16")
        setup = setup_of(model, plan, mesh, PRECISIONS["bf16"], 3, None)
        told = engine_of(model).promise.traffic(micro_batches=3)
        assert planned(setup) == Counter({kind: told.bytes[kind] for kind in KINDS})


@pytest.mark.cover(plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
@pytest.mark.parametrize("mesh", [Mesh(1, 2, 4, 3), Mesh(1, 1, 16, 1), Mesh(1, 3, 2, 1), Mesh()])
def test_matrices_go_to_their_owners_and_back_as_the_engine_expects(plan: str, mesh: Mesh) -> None:
    with fake_group(mesh.world_size):
        model = Net(width=29, depth=4)
        whole = {name: each for name, each in model.named_parameters() if each.ndim == 2 and name.startswith("blocks")}
        others = [each for name, each in model.named_parameters() if name not in whole]
        muon = tz.optim.Muon(
            [*whole.values()], [{"params": [p for p in others if (p.ndim < 2) == (n > 0)]} for n in (0, 1)]
        )
        ranks = device_mesh(mesh)
        model, _ = tz.shard(sharing(model, ranks), muon, plan, mesh=ranks)
        setup = setup_of(model, plan, mesh, PRECISIONS["fp32"], 1, None)
        units = tuple(
            replace(unit, tensors=tuple(replace(each, whole=each.name in whole) for each in unit.tensors))
            for unit in setup.model.units
        )
        setup = replace(setup, model=replace(setup.model, units=units), optimizer=OPTIMIZERS["muon"])
        told = engine_of(model).promise.traffic()
        found = {term.name: term.value for term in traffic_of(setup).collectives}
        assert found.get("all_to_all matrices", 0) == told.bytes["all_to_all"]
        assert sum(move.messages for move in matrix_moves(setup, 0)) == told.count["all_to_all"]


def llama_8b() -> ModelShape:
    """Llama 3 8B, written out."""
    hidden, ffn, keys = 4096, 14336, 1024
    tensors = [
        *(
            TensorShape(name, (out, hidden), "matrix", "column")
            for name, out in (("q", hidden), ("k", keys), ("v", keys))
        ),
        TensorShape("o", (hidden, hidden), "matrix", "row"),
        *(TensorShape(name, (ffn, hidden), "matrix", "column") for name in ("gate", "up")),
        TensorShape("down", (hidden, ffn), "matrix", "row"),
        *(TensorShape(name, (hidden,), "vector") for name in ("n1", "n2")),
    ]
    root = (
        TensorShape("embed", (128256, hidden), "embedding", "vocab"),
        TensorShape("norm", (hidden,), "vector"),
        TensorShape("head", (128256, hidden), "head", "vocab"),
    )
    block = BlockShape(hidden, 32, 8, 128, ffn)
    return ModelShape("llama3-8b", (UnitShape("", root), UnitShape("layers", tuple(tensors), 32, block)), 128256)


def llama_setup(plan: str, mesh: Mesh, **changes: Any) -> Setup:
    cluster = Cluster(device("h100"), mesh.world_size)
    setup = Setup(llama_8b(), cluster, Plan.named(plan), mesh, 8192, precision=PRECISIONS["bf16-pure"], matmul="bf16")
    return replace(setup, **changes)


def test_three_times_the_weights_less_one_gather_of_the_root() -> None:
    found, model = traffic_of(llama_setup("zero3", Mesh(dp_shard=64))), llama_8b()
    expected = 2 * (3 * model.numel - model.root.numel) * 63 / 64
    assert found.total_bytes == pytest.approx(expected, rel=1e-4)
    assert found.links == {"internode": found.total_bytes}


def of(traffic: TrafficFigures, word: str) -> float:
    return sum(term.value for term in traffic.collectives if word in term.name)


def test_hybrid_plans_send_little_between_nodes() -> None:
    found, psi = traffic_of(llama_setup("hybrid_shard", Mesh(dp_shard=8, dp_replicate=16))), 2 * llama_8b().numel
    assert found.links["internode"] == pytest.approx(2 * psi / 8 * 15 / 16, rel=1e-3)
    assert found.links["scaleup"] == pytest.approx((3 * psi - 2 * llama_8b().root.numel) * 7 / 8, rel=1e-3)


def test_tensor_parallel_traffic_is_four_all_reduces_a_block() -> None:
    """And those of embedding and head; what is recomputed ends before a block's last sum."""
    each = 2 * 7 / 8 * 8192 * 4096 * 2
    for sequence_parallel, again, ends in ((True, 1.5, 1), (False, 1, 0)):
        setup = llama_setup("zero0", Mesh(tp=8), micro_batches=3, sequence_parallel=sequence_parallel)
        found = traffic_of(setup)
        assert of(found, "tensor-parallel activations") == pytest.approx(3 * (32 * 4 + 2 + ends) * each)
        assert of(found, "logits") == 3 * 7 / 8 * 8192 * 128256 * 2
        assert set(found.links) == {"scaleup"}
        full = of(traffic_of(replace(setup, checkpointing="full")), "tensor-parallel activations")
        assert full == pytest.approx(3 * (32 * (4 + again) + 2 + ends) * each)


def test_a_loss_of_parts_of_the_vocabulary_sends_three_numbers_a_token() -> None:
    """The highest of each rank, and two sums (Megatron-LM, arXiv 1909.08053 section 3)."""
    found = traffic_of(llama_setup("zero0", Mesh(tp=8), loss="fused"))
    assert of(found, "logits") == 0
    assert of(found, "numbers of the loss") == 8192 * 4 * 7 * (1 + 2 * 2 / 8)


def test_context_parallel_ring_sends_keys_and_values() -> None:
    found = traffic_of(llama_setup("zero1", Mesh(cp=4)))
    once = 3 / 4 * 8192 * (2 * 8 * 128) * 2
    assert of(found, "keys and values") == pytest.approx(32 * 3 * once)


def test_ranks_that_compute_the_whole_attention_send_all_keys_and_values() -> None:
    """Of Phi-3, whose queries, keys and values come from one matrix, ranks along tp put the results together."""
    for mode in ("gather", "ring", "ulysses"):
        sent = set()
        for tp in (1, 2, 4):
            setup = build_setup(Request("phi3-mini", 2 * tp, "h100", "zero3", cp=2, tp=tp, context=mode))  # type: ignore[arg-type]
            sent.add(round(sum(t.value for t in traffic_of(setup).collectives if t.purpose == "context")))
        assert len(sent) == 1, mode


def test_what_checkpointing_repeats_is_repeated_in_one_block_of_n() -> None:
    """Of 32 blocks every eighth: an eighth of what full checkpointing sends beyond none."""
    model = llama_8b()
    assert model.repeated[0].block is not None
    routed = replace(model.repeated[0].block, experts=8, active_experts=2)
    expert = (TensorShape("experts", (8, 14336, 4096), "expert", "column"),)
    mixture = replace(model, units=(model.root, replace(model.repeated[0], tensors=expert, block=routed)))
    setup = llama_setup("zero1", Mesh(dp_shard=8, cp=2, ep=4), model=mixture)
    changes: list[dict[str, Any]] = [{}, {"checkpointing": "full"}, {"checkpointing": "full", "every": 8}]
    for word in ("keys and values", "expert tokens"):
        none, full, eighth = (of(traffic_of(replace(setup, **change)), word) for change in changes)
        assert none < full
        assert eighth - none == pytest.approx((full - none) / 8)


def test_compressed_keys_and_values_travel_compressed() -> None:
    """DeepSeek-V3: 512 channels of both and 64 rotary ones, whatever the queries' width (arXiv 2412.19437)."""
    setup = llama_setup("zero1", Mesh(cp=2), model=model_shape("deepseek-v3"), sequence=4096)
    assert of(traffic_of(setup), "keys and values") == pytest.approx(61 * 3 * 4096 * (512 + 64) * 2 / 2)


def test_pipeline_boundaries() -> None:
    each = 8192 * 4096 * 2
    two = traffic_of(llama_setup("zero0", Mesh(pp=2), micro_batches=8))
    four = traffic_of(llama_setup("zero0", Mesh(pp=4), micro_batches=8, virtual_stages=2))
    assert of(two, "pipeline") == 8 * each
    assert of(four, "pipeline") == 8 * 2 * 2 * each


def test_a_rank_in_the_middle_sends_both_ways_though_the_first_has_as_many_units() -> None:
    found = traffic_of(build_setup(Request("llama3-8b", 4, pp=4, strategy="zero1", sequence=4096, micro_batches=8)))
    assert of(found, "pipeline") == 8 * 2 * (4096 * 4096 * 2)


def test_expert_tokens() -> None:
    model = llama_8b()
    blocks, root = model.repeated[0], model.root
    assert blocks.block is not None
    expert = (TensorShape("experts", (8, 14336, 4096), "expert", "column"),)
    mixture = replace(blocks, tensors=expert, block=replace(blocks.block, experts=8, active_experts=2))
    setup = llama_setup("zero1", Mesh(dp_shard=8, ep=4), model=replace(model, units=(root, mixture)))
    found = traffic_of(setup)
    assert of(found, "expert tokens") == pytest.approx(32 * 4 * 8192 * 4096 * 2 * 2 * 3 / 4)
    dense = 2 * (root.numel * 7 / 8 + 32 * 2 * 14336 * 4096 * 1 / 2)  # a quarter of the experts, on two ranks
    assert of(found, "reduce_scatter") == pytest.approx(dense, rel=1e-4)


def test_experts_rest_split_over_the_ranks_that_gather_them() -> None:
    """Of six ranks of the inner axis three have parts of the same experts, where four share out whole ones."""
    experts = UnitShape("block", (TensorShape("experts", (8, 14336, 4096), "expert", "column"),))
    setup = llama_setup("hfsdp", Mesh(dp_shard=6, dp_replicate=4, ep=4), precision=PRECISIONS["bf16"])
    [bucket] = buckets(experts, placement_of(setup, ON_DEVICE))
    own = 2 * experts.numel / 4 / 3
    assert bucket.resting["weight"][1] == pytest.approx(own, rel=1e-4)
    assert [move.sent_bytes for move in bucket.weight_gathers] == [pytest.approx(2 * own, rel=1e-4)]


@pytest.mark.parametrize(
    ("offload", "pcie", "disk", "of_blocks"),
    [
        ("cpu", 4 + 2, 0, 0),  # gradients out, bf16 weights back
        ("cpu-all", 4 + 2, 0, 2),  # weights in for forward, and but for the root's for backward again
        ("nvme", 4 + 2, 12 + 12, 0),  # master weights and moments read and written
        ("nvme-all", 4 + 2, 2 + 12 + 12 + 2, 2),  # weights read once or twice, and written
    ],
)
def test_offload_copies(offload: str, pcie: int, disk: int, of_blocks: int) -> None:
    """Bytes for each element of a rank's shard."""
    setup = llama_setup("zero3", Mesh(dp_shard=8), precision=PRECISIONS["bf16"])
    psi, blocks = llama_8b().numel / 8, 32 * llama_8b().repeated[0].numel / 8
    found = traffic_of(replace(setup, plan=Plan.named(f"zero3@{offload}"))).links
    assert found["pcie"] == pytest.approx(psi * pcie + blocks * of_blocks, rel=1e-3)
    assert found.get("disk", 0) == pytest.approx(disk and psi * disk + blocks * of_blocks, rel=1e-3)


def test_weights_of_frozen_blocks_in_front_come_from_the_host_once() -> None:
    """Of 32 blocks 10, and the embedding, are frozen: per element of a shard 2 B in forward, and no 2 B in backward."""
    shape = with_ends(with_frozen(model_shape("llama3-8b"), ("model.embed*", "model.layers.[0-9].*")))
    setup = llama_setup("zero3", Mesh(dp_shard=8), precision=PRECISIONS["bf16"])
    setup = replace(setup, model=shape, plan=Plan.named("zero3@cpu-all"), micro_batches=3)
    found = {term.name: term.value for term in traffic_of(setup).collectives}
    elements, block = shape.numel / 8, shape.repeated[0].numel / 8
    assert found["copy weights to the device"] == pytest.approx(3 * 2 * (elements + 22 * block), rel=1e-3)


def test_stages_gather_what_no_gradient_goes_back_through_once_for_each_forward() -> None:
    setup = replace(llama_setup("zero3", Mesh(pp=2, dp_shard=4)), micro_batches=4)
    block = setup.model.repeated[0]
    for unit, passes in ((block, 8), (replace(block, forward_only=True), 4)):
        repeats = repetitions(setup, unit)
        assert repeats["forward"] + repeats["backward"] == passes


def test_shares_of_the_units_copy_their_share() -> None:
    """Of 33 units the last 16 are on the host."""
    setup = llama_setup("zero3", Mesh(dp_shard=8), precision=PRECISIONS["bf16"])
    block = llama_8b().repeated[0].numel / 8
    found = traffic_of(replace(setup, plan=Plan("D", "D", "D@cpu:0.5", "D@cpu:0.5"))).links
    assert found["pcie"] == pytest.approx(16 * block * (4 + 2), rel=1e-3)


def test_micro_batches_add_up_on_the_host() -> None:
    """Sums of earlier micro-batches go there and come back."""
    setup = llama_setup("zero3", Mesh(dp_shard=8), precision=PRECISIONS["bf16"])
    psi = llama_8b().numel / 8
    found = traffic_of(replace(setup, plan=Plan.named("zero3@cpu"), micro_batches=3)).links
    assert found["pcie"] == pytest.approx(psi * (4 + 2 + 2 * (4 + 4)), rel=1e-3)


@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_a_bare_count_is_not_padded(plan: str) -> None:
    model = ModelShape("bare", (UnitShape("", (TensorShape("all", (70_000_000_001,)),)),), bare=True)
    mesh = Mesh(dp_shard=3, dp_replicate=2) if plan in TABLE_2D else Mesh(dp_shard=6)
    setup = Setup(model, Cluster(device("h100"), 6), Plan.named(plan), mesh, precision=PRECISIONS["bf16-pure"])
    found = traffic_of(setup).total_bytes
    assert math.isfinite(found)
    if plan == "zero0":
        assert found == pytest.approx(2 * 2 * 70_000_000_001 * 5 / 6, rel=1e-12)
