"""Step time: published steps, what any answer must obey, and the arithmetic of bubbles, rings and overlap."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.engine import PRECISIONS, Offload, Plan, Precision
from terrazzo.errors import BadInput
from terrazzo.planner.figures import Term, TimeFigures
from terrazzo.planner.machine.devices import Cluster, Device, MeasuredHost, device
from terrazzo.planner.machine.mesh import Mesh, RankGroup, group_of
from terrazzo.planner.machine.network import Network
from terrazzo.planner.machine.transfers import UnitTransfer, When
from terrazzo.planner.memory.activations import block_activations
from terrazzo.planner.memory.states import state_terms
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.model.shapes import BlockShape, ModelShape, TensorShape, UnitShape
from terrazzo.planner.report.all_formulas import FORMULAS
from terrazzo.planner.report.words import seconds_text
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.framework import Framework
from terrazzo.planner.setup.optimizers import OPTIMIZERS
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.timing.attention import attention_bytes, attention_rate, attention_seconds
from terrazzo.planner.timing.compute import block_seconds, flops_per_token, repeated_flops_per_token, step_flops
from terrazzo.planner.timing.overlap import BlockRow, block_exposure, root_exposure
from terrazzo.planner.timing.pipeline_rank import PipelineRank
from terrazzo.planner.timing.products import product
from terrazzo.planner.timing.rank_update import HOST_ADAM
from terrazzo.planner.timing.rates import matmul_rate, memory_rate, sustained_rate
from terrazzo.planner.timing.step import BAND, time_of
from terrazzo.planner.timing.update import UnitUpdate, exposed_s
from terrazzo.planner.traffic.volumes import traffic_of
from tests.helpers.calls import calls_of

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_embd": 768, "n_head": 12,
    "n_positions": 1024,
}  # fmt: skip
FSDP = Precision(weight="fp32", compute="bf16", reduce="fp32")  # type: ignore[arg-type]
"""What FSDP2 and torchtitan keep."""


def llama(layers: int = 32, hidden: int = 4096, ffn: int = 14336, heads: int = 32, kv_heads: int = 8) -> ModelShape:
    """A Llama 3 of any size, written out; of Llama 3 8B by default."""
    keys = hidden // heads * kv_heads
    outputs = {"q": hidden, "k": keys, "v": keys, "gate": ffn, "up": ffn}
    tensors = [TensorShape(name, (out, hidden), "matrix", "column") for name, out in outputs.items()]
    tensors += [
        TensorShape("o", (hidden, hidden), "matrix", "row"),
        TensorShape("down", (hidden, ffn), "matrix", "row"),
    ]
    tensors += [TensorShape(name, (hidden,), "vector") for name in ("n1", "n2")]
    root = (
        TensorShape("embed", (128256, hidden), "embedding", "vocab"),
        TensorShape("norm", (hidden,), "vector"),
        TensorShape("head", (128256, hidden), "head", "vocab"),
    )
    block = BlockShape(hidden, heads, kv_heads, hidden // heads, ffn, rotated=hidden // heads)
    return ModelShape("llama", (UnitShape("", root), UnitShape("layers", tuple(tensors), layers, block)), 128256)


def setup(plan: str | Plan = "zero3", mesh: Mesh | None = None, gpu: str = "h100", **changes: Any) -> Setup:
    mesh = mesh or Mesh(dp_shard=8)
    cluster = Cluster(device(gpu), mesh.world_size)
    plan = Plan.named(plan) if isinstance(plan, str) else plan
    found = Setup(llama(), cluster, plan, mesh, 8192, precision=FSDP, matmul="bf16", checkpointing="selective_half")
    return replace(found, **changes)


def flops_of(found: Setup) -> float:
    return flops_per_token(found.model, found.sequence)


def timed(found: Setup) -> TimeFigures:
    answer = time_of(found)
    assert isinstance(answer, TimeFigures), answer
    return answer


# -- published steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "changes", "tokens_per_s"),
    [
        (8, {"compile": True, "loss": "fused"}, 6667),
        (128, {"compile": True, "loss": "fused"}, 6514),
        (8, {"compile": True, "loss": "fused", "matmul": "fp8"}, 8532),
        (8, {}, 5762),
    ],
)
def test_torchtitan_on_500_watt_h100(ranks: int, changes: dict[str, Any], tokens_per_s: float) -> None:
    """Llama 3 8B, FSDP2, two sequences of 8,192 (pytorch/torchtitan/benchmarks/llama3_h100_202412_torchtitan.md)."""
    found = setup(mesh=Mesh(dp_shard=ranks), gpu="H100-SXM-96GB-HBM2e", micro_batch=2, **changes)
    assert timed(found).tokens_per_s_per_gpu == pytest.approx(tokens_per_s, rel=0.12)


def test_llama3_405b_on_16384_h100() -> None:
    """43 % MFU at 8,192 devices, 41 % at 16,384 with half the micro-batches (arXiv 2407.21783, table 4)."""
    model = llama(126, 16384, 53248, 128, 8)
    found = {}
    for shards in (64, 128):
        mesh = Mesh(dp_shard=shards, tp=8, pp=16)
        options = {
            "model": model,
            "checkpointing": "none",
            "compile": True,
            "virtual_stages": 8,
            "framework": Framework("megatron"),
        }
        found[shards] = timed(
            setup("zero2", mesh, micro_batches=2048 // shards, accumulate_locally=True, **options)
        ).mfu
    assert found[64] == pytest.approx(0.43, rel=0.12)
    assert found[128] == pytest.approx(0.41, rel=0.12)
    assert found[128] < found[64]


def gpt(layers: int, hidden: int, heads: int) -> ModelShape:
    """GPT-3's kind, as Megatron-LM builds it: fused projections, biases, layer norms, a tied head."""
    matrices = {"qkv": (3 * hidden, hidden), "proj": (hidden, hidden), "up": (4 * hidden, hidden)}
    tensors = [TensorShape(n, s, "matrix", "row" if n == "proj" else "column") for n, s in matrices.items()]
    tensors += [TensorShape("down", (hidden, 4 * hidden), "matrix", "row")]
    tensors += [TensorShape(f"v{i}", (hidden,), "vector") for i in range(8)]
    root = (TensorShape("embed", (51200, hidden), "embedding", "vocab"), TensorShape("norm", (hidden,), "vector"))
    block = BlockShape(hidden, heads, heads, hidden // heads, 4 * hidden, gated=False, norm="layer", dropout=True)
    return ModelShape(
        "gpt", (UnitShape("", root), UnitShape("blocks", tuple(tensors), layers, block)), 51200, tied=True
    )


def megatron(mesh: Mesh, micro_batch: int, plan: str = "zero0", **changes: Any) -> float:
    """TFLOP/s per device with recomputation, of 175 B parameters and 1,536 sequences of 2,048 (arXiv 2104.04473)."""
    layers, hidden, vocab, sequences = 96, 12288, 51200, 1536
    options = {
        "model": gpt(layers, hidden, 96), "sequence": 2048, "micro_batch": micro_batch, "matmul": "fp16",
        "micro_batches": sequences // micro_batch // mesh.batch_ranks, "precision": PRECISIONS["fp16"],
        "checkpointing": "full", "attention": "math", "sequence_parallel": False,
        "framework": Framework("megatron" if mesh.pp > 1 else "terrazzo"),
    }  # fmt: skip
    step_s = timed(setup(plan, mesh, "A100", **(options | changes))).step_s
    flops = 96 * sequences * 2048 * layers * hidden**2 * (1 + 2048 / 6 / hidden + vocab / 16 / layers / hidden)
    return flops / mesh.world_size / step_s / 1e12


def test_megatron_175b_scales_to_1536_a100() -> None:
    """153, 149 and 141 TFLOP/s (arXiv 2104.04473, table 2)."""
    for replicas, published in ((4, 153), (8, 149), (16, 141)):
        assert megatron(Mesh(dp_shard=replicas, tp=8, pp=12), 1) == pytest.approx(published, rel=0.12)


def test_the_strong_scaling_cliff_of_zero3() -> None:
    """144, 88 and 44 TFLOP/s (the same table): a collective for each parameter, whose latency grows with the ring."""
    found = [
        megatron(Mesh(dp_shard=ranks), micro_batch, "zero3", coalesced=False, prefetch=0)
        for ranks, micro_batch in ((384, 4), (768, 2), (1536, 1))
    ]
    for value, published in zip(found, (144, 88, 44), strict=True):
        assert value == pytest.approx(published, rel=0.3)
    assert found[1] < 0.75 * found[0] and found[2] < 0.6 * found[1]


# -- what nothing can be said of -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cluster": Cluster(Device("mine", memory_bytes=2**36), 8)}, "no peak of mine in bf16"),
        ({"cluster": Cluster(device("A10G"), 8)}, "no peak of A10G"),
        ({"cluster": Cluster(device("V100"), 8)}, "no peak of V100-SXM2-32GB in bf16"),
        ({"cluster": Cluster(replace(device("h100"), memory_bandwidth=None), 8)}, "memory bandwidth"),
        (
            {"cluster": Cluster(replace(device("h100"), internode_bandwidth=None), 16), "mesh": Mesh(dp_shard=16)},
            "hosts",
        ),
        ({"sequence": 0}, "sequence length"),
        ({"model": ModelShape("bare", (UnitShape("", (TensorShape("all", (10**9,)),)),))}, "blocks"),
    ],
)
def test_no_time_without_the_figures(changes: dict[str, Any], reason: str) -> None:
    answer = time_of(replace(setup(), **changes))
    assert isinstance(answer, str) and reason in answer


def test_links_between_devices_are_named_where_they_would_do_instead_of_pcie() -> None:
    """Ranks of a host exchange over either; copies to the host go over PCIe alone."""
    unknown = Device("mine", memory_bytes=2**36, peak_flops={"bf16": 1e14}, memory_bandwidth=1e12)
    for strategy, named in (("zero3", True), ("zero3@cpu", False)):
        found = time_of(setup(strategy, Mesh(dp_shard=8), cluster=Cluster(unknown, 8)))
        assert isinstance(found, str) and "--pcie-gb-s" in found
        assert ("nor of links between devices" in found and "--scaleup-gb-s" in found) is named


def test_all_figures_that_time_needs_are_named_at_once_with_their_options() -> None:
    answer = time_of(setup(cluster=Cluster(Device("mine", memory_bytes=2**36), 16), mesh=Mesh(dp_shard=16)))
    assert isinstance(answer, str)
    assert [word for word in ("--peak-tflops", "--memory-tb-s", "--internode-gb-s") if word not in answer] == []


def test_no_mfu_of_a_rate_without_a_peak() -> None:
    found = replace(device("h100"), peak_flops={}, matmul_flops={"bf16": 7e14})
    assert timed(replace(setup(), cluster=Cluster(found, 8))).mfu is None


# -- what any answer must obey ---------------------------------------------------------------------------------

EVERY = [
    setup("zero0"),
    setup("zero3", compile=True, checkpointing="none"),
    setup("hfsdp", Mesh(dp_shard=8, dp_replicate=4), micro_batches=4),
    setup("zero1", Mesh(dp_shard=4, tp=8, pp=4), micro_batches=16, checkpointing="full", virtual_stages=2),
    setup("zero2", Mesh(dp_shard=4, cp=4), accumulate_locally=True, micro_batches=2),
]


@pytest.mark.parametrize("found", EVERY)
def test_terms_add_up_and_are_explained(found: Setup) -> None:
    answer = timed(found)
    assert answer.step_s == pytest.approx(sum(term.value for term in answer.terms))
    assert all(term.formula in FORMULAS and term.unit == "s" and 0 < term.value <= term.upper for term in answer.terms)
    assert len({term.name for term in answer.terms}) == len(answer.terms)
    tokens = found.global_batch * found.sequence
    assert answer.tokens_per_s_per_gpu == pytest.approx(tokens / answer.step_s / found.mesh.world_size)
    assert answer.mfu == pytest.approx(answer.flops_per_token * answer.tokens_per_s_per_gpu / 989e12)
    assert 0 < answer.mfu < 0.9


def test_flops_follow_palm() -> None:
    """6 N + 12 L H Q T with N without the input embedding (arXiv 2204.02311, appendix B)."""
    assert flops_of(setup()) == pytest.approx(6 * (8.0303e9 - 0.5253e9) + 12 * 32 * 4096 * 8192, rel=1e-3)
    model = llama()
    block = model.repeated[0].block
    assert block is not None
    near = replace(model, units=(model.root, replace(model.repeated[0], block=replace(block, window=1024))))
    less = flops_of(setup()) - flops_of(setup(model=near))
    assert less == pytest.approx(12 * 32 * 4096 * (8192 - 1024))
    fused, math = (timed(setup(model=near, attention=kernel)) for kernel in ("flash", "math"))
    assert fused.flops_per_token == math.flops_per_token  # the model's, not the kernel's, which computes what is masked
    assert fused.mfu > math.mfu


@pytest.mark.parametrize(
    ("preset", "compiled", "elements"),
    [
        ("llama3-8b", False, 10 * 40 * 128),
        ("llama3-8b", True, 2 * 40 * 128),
        ("gpt-neox-20b", False, 10 * 128 * 24 + 2 * 128 * 96),  # a quarter of each head turned, and all of it copied
        ("gpt-neox-20b", True, 2 * 128 * 96),
        ("gpt-j-6b", False, 10 * 32 * 64 + 2 * 32 * 256),
        ("falcon-7b", False, 10 * 72 * 64),
        ("deepseek-v3", False, 10 * 129 * 64 + 2 * 256 * 192),  # one key of 64 channels is turned for 128 heads
        ("gpt3-175b", False, 0),
        ("mpt-7b", False, 0),
    ],
)
def test_rotations_move_what_heads_have(preset: str, compiled: bool, elements: int) -> None:
    """Elements per token: ten for each that plain operators turn, and two that putting it together copies."""
    found = setup(model=model_shape(preset), compile=compiled)
    unit = found.model.repeated[0]
    assert unit.block is not None
    still = replace(unit, block=replace(unit.block, rotated=0))
    seconds = block_seconds(found, unit).memory - block_seconds(found, still).memory
    moved = seconds * memory_rate(found.cluster.device) / (3 * 2 * found.rank_tokens)  # of 16 bits, backward twice
    assert moved == pytest.approx(elements)


def test_megatron_core_moves_what_compiled_blocks_do_but_for_residuals() -> None:
    """Its norms, rotations and SwiGLU are one kernel each; residuals are apart, 3 elements for 1.5."""
    ours, compiled = setup(framework=Framework("megatron")), setup(compile=True)
    seconds = [block_seconds(found, found.model.repeated[0]).memory for found in (ours, compiled)]
    more = 2 * 1.5 * 4096 * 3 * 2 * ours.rank_tokens  # of 16 bits, backward twice
    assert (seconds[0] - seconds[1]) * memory_rate(ours.cluster.device) == pytest.approx(more)


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize("mode", ["selective", "selective_half"])
def test_what_selective_checkpointing_keeps_is_not_computed_twice(attention: str, mode: str) -> None:
    """Memory and time tell of one way: more is kept by just those ways that repeat less."""
    options: dict[str, Any] = {"attention": attention, "micro_batch": 4}
    selective, none, full = (setup(checkpointing=each, **options) for each in (mode, "none", "full"))
    repeated = {term.name: term.value for term in timed(selective).terms}["recomputation"]
    whole = {term.name: term.value for term in timed(full).terms}["recomputation"]
    assert 0 < repeated < whole
    products = 2 * (none.model.matmul_numel - none.model.logits * none.model.hidden)
    scores = flops_of(none) / 3 - 2 * none.model.matmul_numel
    again = (step_flops(selective) - step_flops(none)) / none.tokens
    halved = products / 2 if mode == "selective_half" else 0
    assert again == pytest.approx(halved + (scores if attention == "math" else 0))
    block = none.model.repeated[0].block
    assert block is not None
    kept = [block_activations(one, block) for one in (full, selective, none)]
    assert kept[0].saved < kept[1].saved < kept[2].saved
    assert kept[1].saved + kept[1].recomputed == pytest.approx(kept[2].saved)


def test_every_second_product_is_what_torchtitan_keeps() -> None:
    """Of Llama 3 8B input, queries, values, attention, gate and down: 1 + 1 + 1/4 + 1 + 3.5 + 1 times its width."""
    made = setup(micro_batch=1)
    block = made.model.repeated[0].block
    assert block is not None
    one = block_activations(made, block).saved / made.tokens / 2 / 4096
    assert one == 7.75
    assert block_activations(replace(made, checkpointing="selective"), block).saved > made.tokens * 2 * 4096 * 12


def test_recomputation_costs_a_fifth_to_a_quarter() -> None:
    """20 to 25 % of the throughput (stas00/ml-engineering, training/performance)."""
    without, with_it = timed(setup(checkpointing="none")), timed(setup(checkpointing="full"))
    assert 0.18 < 1 - without.step_s / with_it.step_s < 0.27
    assert step_flops(setup(checkpointing="full")) == pytest.approx(
        4 / 3 * step_flops(setup(checkpointing="none")), rel=0.05
    )


def test_more_of_anything_takes_longer() -> None:
    base = timed(setup()).step_s
    assert timed(setup(micro_batch=2)).step_s > base
    assert timed(setup(micro_batches=2)).step_s > base
    assert timed(setup(sequence=16384)).step_s > 2 * base
    assert timed(setup(checkpointing="full")).step_s > base
    assert timed(setup(gpu="A100")).step_s > base
    assert timed(setup(compile=True)).step_s < base
    assert timed(setup(matmul="fp8")).step_s < timed(setup(matmul="fp8", recipe="rowwise")).step_s < base
    assert timed(setup(prefetch=0)).step_s > base
    assert timed(setup(attention="math")).step_s > base


def exposed_along_tp(**changes: Any) -> float:
    found = timed(setup("zero1", Mesh(dp_shard=2, tp=4), **changes))
    return next(term.value for term in found.terms if term.formula == "time.tensor")


def test_products_hide_the_exchanges_along_tp_that_run_beside_them() -> None:
    """Two fifths of all under async; half of backward's: two gathers and two sums of each of 32 layers, and what the
    embeddings and the head exchange, which is less than a layer.
    """
    none = exposed_along_tp(checkpointing="none")
    assert exposed_along_tp(checkpointing="none", tensor_overlap="async") == pytest.approx(0.6 * none)
    around_s = 4 * (8192 * 4096 * 2 * 3 / 4 / (0.8 * 450e9) + 8.4e-6 + 3 * 3.4e-6)
    hidden = none - exposed_along_tp(checkpointing="none", tensor_overlap="backward")
    assert 0.5 * 32 * around_s < hidden < 0.5 * 33 * around_s


@pytest.mark.parametrize(("framework", "usual"), [("megatron", "backward"), ("terrazzo", "none"), ("fsdp2", "none")])
def test_what_a_stack_hides_along_tp_by_itself(framework: str, usual: str) -> None:
    request = Request("llama3-8b", 8, tp=4, strategy="zero1", framework=framework)
    assert build_setup(request).tensor_overlap == usual
    assert build_setup(replace(request, tensor_overlap="async")).tensor_overlap == "async"


def test_recipes_of_fp8_are_as_fast_as_devices_have_them() -> None:
    """In the order that torchao measured of Llama 3 8B on 8 B200, and on 8 H100, without units for 32 elements."""
    for gpu, order in (("B200", ("tensorwise", "mx", "rowwise")), ("h100", ("tensorwise", "rowwise"))):
        times = [timed(setup(gpu=gpu, matmul="fp8", recipe=recipe)).step_s for recipe in order]
        assert times == sorted(times)
        assert times[-1] < timed(setup(gpu=gpu)).step_s


def test_fp8_reaches_of_its_peak_what_bf16_does_of_its_own() -> None:
    """MI300X reaches 668 of 1,307 TFLOP/s in bf16, and fp8 was not measured; of H200 fp8 alone was."""
    assert matmul_rate(device("MI300X"), "fp8") == pytest.approx(0.95 * 668 / 1307 * 2614e12)
    assert matmul_rate(device("H200"), "fp8") == 1453e12
    assert matmul_rate(device("H100-PCIE-80GB"), "fp8") == pytest.approx(
        0.72 * device("H100-PCIE-80GB").peak_flops["fp8"]
    )


def test_few_tokens_on_a_slow_network_are_bound_by_communication() -> None:
    slow = replace(device("h100"), internode_bandwidth=1e9)
    found = timed(setup(mesh=Mesh(dp_shard=64), cluster=Cluster(slow, 64), sequence=1024))
    assert found.bound_by == "communication"
    assert timed(setup(mesh=Mesh(dp_shard=64))).bound_by == "compute"


def test_a_short_batch_in_a_long_pipeline_is_bound_by_the_bubble() -> None:
    assert timed(setup("zero0", Mesh(pp=16), micro_batches=4)).bound_by == "pipeline bubble"


def test_offload_is_slower_and_said_to_bound() -> None:
    plan = Plan("D", "D", "D@cpu", "D@cpu")
    found = timed(setup(plan=plan, sequence=512))
    assert found.bound_by == "offload"
    assert found.step_s > timed(setup(sequence=512)).step_s
    disk = setup(plan=Plan("D@nvme", "D@nvme", "D@cpu", "D@nvme"))
    assert "disks" in str(time_of(disk))
    fast = timed(replace(disk, cluster=replace(disk.cluster, disk_bandwidth=20e9))).step_s
    assert fast < timed(replace(disk, cluster=replace(disk.cluster, disk_bandwidth=5e9))).step_s


UPDATES = st.lists(st.tuples(*[st.integers(0, 20)] * 3), min_size=1, max_size=6)


def simulated(units: list[tuple[int, int, int]], step: str) -> int:
    """By how much a step is longer, second by second: update, forward and backward of each unit."""
    if step == "synchronous":
        return sum(update for update, _, _ in units)
    updated = now = 0
    if step == "overlapped":
        for update, forward, _ in units:
            updated += update
            now = max(now, updated) + forward
        return now - sum(forward for _, forward, _ in units)
    for update, _, backward in reversed(units):
        now += backward  # its gradient is final
        updated = max(updated, now) + update
    return updated - now


@given(UPDATES, st.sampled_from(["overlapped", "backward", "synchronous"]))
def test_what_an_update_adds_is_what_a_simulation_waits_for(units: list[tuple[int, int, int]], step: str) -> None:
    found = exposed_s([UnitUpdate(update, 0, 0, forward, backward) for update, forward, backward in units], step)
    assert found == simulated(units, step)


def test_an_update_takes_as_long_as_its_slowest_part() -> None:
    assert UnitUpdate(3, 2, 1, 0, 0).seconds == 3
    assert UnitUpdate(1, 2, 5, 0, 0).seconds == 5


def test_the_step_waits_for_units_whose_matrices_are_updated_whole() -> None:
    """3 s of such a unit, and 2 s of the first, which nothing hides; the last one's 4 s are hidden behind 10 s."""
    units = [UnitUpdate(2, 0, 0, 5, 5), UnitUpdate(3, 0, 0, 5, 5, at_once=True), UnitUpdate(4, 0, 0, 5, 5)]
    assert exposed_s(units, "overlapped") == 3 + 2
    terms = timed(setup(plan=Plan.named("zero3@cpu"), optimizer=OPTIMIZERS["muon"])).terms
    assert not any(term.formula == "time.optimizer" for term in terms)  # no state is on the device
    offloaded = next(term for term in terms if term.formula == "time.host")
    assert offloaded.inputs["hidden_s"] < 0.1 * offloaded.inputs["total_s"]  # of the root alone


def test_enough_tokens_hide_the_update() -> None:
    """All but the root's and the first block's, whose weights are needed first; on the spot nothing is hidden."""

    def host(tokens: int, step: str = "overlapped") -> Term:
        offloaded = setup(plan=Plan.named("zero3@cpu"), sequence=tokens, offload=Offload(step=step))  # type: ignore[arg-type]
        return next(term for term in timed(offloaded).terms if term.formula == "time.host")

    few, many = host(512), host(65_536)
    first = (llama().root.numel + llama().repeated[0].numel) / HOST_ADAM
    assert many.value == pytest.approx(first, rel=1e-2)
    assert few.value > 5 * first
    assert few.inputs["total_s"] == many.inputs["total_s"] == host(512, "synchronous").value
    assert many.value <= host(65_536, "backward").value <= few.value
    assert many.inputs["elements"] == pytest.approx(llama().numel, rel=1e-3)


def test_only_offloaded_units_are_updated_on_the_host() -> None:
    terms = {term.name: term for term in timed(setup(plan=Plan("D", "D", "D@cpu:0.5", "D@cpu:0.5"))).terms}
    there, here = terms["update of offloaded states"], terms["optimizer step"]
    block = llama().repeated[0].numel
    assert there.inputs["elements"] == pytest.approx(16 * block, rel=1e-3)
    whole = next(term for term in timed(setup()).terms if term.name == "optimizer step")
    assert here.value / whole.value == pytest.approx(1 - 16 * block / llama().numel, rel=1e-3)


def test_states_on_a_disk_take_its_reads_and_writes() -> None:
    found = setup(plan=Plan.named("zero3@nvme"), cluster=Cluster(device("h100"), 8, disk_bandwidth=8e9))
    term = next(term for term in timed(found).terms if term.formula == "time.host")
    assert term.inputs["disk_s"] == pytest.approx(24 * llama().numel / 8e9, rel=1e-3)
    assert term.inputs["total_s"] == pytest.approx(term.inputs["disk_s"])


def test_cost_per_million_tokens() -> None:
    found = timed(setup(cluster=Cluster(device("h100"), 8, price_per_hour=2.5)))
    assert found.cost_per_million_tokens == pytest.approx(2.5 / (found.tokens_per_s_per_gpu * 3600) * 1e6)
    assert timed(setup()).cost_per_million_tokens is None


def answer(found: Setup) -> TimeFigures:
    return time_of(found, traffic_of(found))


def test_one_answer_takes_few_calls() -> None:
    """Of a model that was asked about before: a search asks of hundreds of layouts."""
    for found in EVERY:
        answer(found)
        assert 100 < calls_of(partial(answer, found)) < 4000


# -- what is explained, and what memory says too -----------------------------------------------------------------


def mixture(layers: int = 4, experts: int = 16) -> ModelShape:
    """A llama whose blocks hold routed experts in place of the MLP."""
    model = llama(layers, 1024, 512, 8, 4)
    blocks = model.repeated[0]
    assert blocks.block is not None
    kept = tuple(tensor for tensor in blocks.tensors if tensor.name not in ("gate", "up", "down"))
    stacks = [("gate", (experts, 512, 1024), "column"), ("down", (experts, 1024, 512), "row")]
    routed = tuple(TensorShape(name, shape, "expert", split) for name, shape, split in stacks)  # type: ignore[arg-type]
    block = replace(blocks.block, experts=experts, active_experts=2)
    return replace(model, units=(model.root, replace(blocks, tensors=(*kept, *routed), block=block)))


EXPLAINED = [
    *EVERY,
    setup("zero1", Mesh(dp_shard=4, tp=2, pp=4), micro_batches=6, virtual_stages=2, attention="math"),
    setup("zero2", Mesh(dp_shard=8, ep=4, cp=2), model=mixture(), micro_batches=2),
    setup(plan=Plan("D@nvme", "D@nvme", "D@cpu", "D@nvme"), cluster=Cluster(device("h100"), 8, disk_bandwidth=4e9)),
]


@pytest.mark.parametrize("found", EXPLAINED)
def test_the_inputs_of_a_term_put_into_its_formula_give_its_value(found: Setup) -> None:
    for term in timed(found).terms:
        text = FORMULAS[term.formula].text.partition(";")[0]
        assert eval(text, {"__builtins__": {}}, dict(term.inputs)) == pytest.approx(term.value), term.name


def test_flops_of_attention_are_explained() -> None:
    """Two products forward and five backward of causal scores: half of 2 * tokens * sequence * hidden each."""
    term = next(term for term in timed(setup(micro_batches=2)).terms if term.name == "attention")
    assert term.inputs["flops"] == pytest.approx(2 * 32 * 7 * 8192 * 8192 * 4096)
    narrow = replace(llama().repeated[0].block, head_dim=64, heads=64, value_dim=64)  # type: ignore[type-var]
    model = replace(llama(), units=(llama().root, replace(llama().repeated[0], block=narrow)))
    term = next(term for term in timed(setup(model=model, micro_batches=2)).terms if term.name == "attention")
    assert term.inputs["flops"] == pytest.approx(2 * 32 * 7 * 8192 * 8192 * 4096)
    assert term.value == pytest.approx(term.inputs["flops"] / 273e12, rel=0.08)  # 8,192 tokens, 64 channels


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3", "hybrid_shard", "hfsdp"])
@pytest.mark.parametrize("ep", [1, 4, 16])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_optimizer_updates_what_memory_holds(plan: str, ep: int, tp: int, pp: int) -> None:
    """Each element of a rank is one of its moments; which elements these are, memory and time must agree on."""
    mesh = Mesh(dp_shard=16, dp_replicate=2 if plan in ("hybrid_shard", "hfsdp") else 1, tp=tp, pp=pp, ep=ep)
    found = setup(plan, mesh, model=mixture(), precision=PRECISIONS["bf16"], micro_batches=2)
    states = [{term.name: term.value for term in state_terms(found, stage)} for stage in range(pp)]
    step = next(term for term in timed(found).terms if term.name == "optimizer step")
    owned = step.inputs["bytes"] / (2 * (4 + 4 + 8) + 2)  # gradient, master and moments both ways, the weight once
    assert any(owned * 8 == pytest.approx(each["moments"], rel=1e-3) for each in states)


@pytest.mark.parametrize("ep", [1, 2, 4, 8, 16])
def test_expert_parallelism_takes_no_work_from_the_optimizer(ep: int) -> None:
    """An expert is on fewer ranks, and split over fewer: each of 16 ranks updates a sixteenth of the model."""
    model = mixture()
    found = setup("zero1", Mesh(dp_shard=16, ep=ep), model=model, precision=PRECISIONS["bf16"])
    step = next(term for term in timed(found).terms if term.name == "optimizer step")
    assert step.inputs["bytes"] == pytest.approx(34 * model.numel / 16, rel=1e-3)
    on_host = replace(found, plan=Plan("-", "-", "D@cpu", "D@cpu"))
    sent = {term.name: term.value for term in traffic_of(on_host).collectives}
    assert sent["copy gradients to the host"] == pytest.approx(4 * model.numel / 16, rel=1e-3)
    assert sent["copy updated weights to the device"] == pytest.approx(2 * model.numel / 16, rel=1e-3)


@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 16}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 2}, {"tp": 2, "ep": 8}])
def test_ranks_share_the_products_of_a_batch_however_they_share_experts(axes: dict[str, int]) -> None:
    """Where no tiles are lost at the edges: 16 ranks, whose tokens in all are the same."""
    tp = axes.get("tp", 1)
    host = Cluster(replace(device("h100"), kind="cpu"), 16)
    mesh, model = Mesh(dp_shard=16 // tp, **axes), mixture()
    found = setup("zero1", mesh, model=model, micro_batch=tp, cluster=host)
    alone = setup("zero1", Mesh(dp_shard=16), model=model, cluster=host)
    assert block_seconds(found, model.repeated[0]).matmul == pytest.approx(
        block_seconds(alone, model.repeated[0]).matmul
    )


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_matrices_stored_input_first_cost_the_same(tp: int) -> None:
    """As GPT-2's are: [in, out]."""
    model = gpt(4, 1024, 16)
    turned = tuple(replace(tensor, shape=tensor.shape[::-1]) for tensor in model.repeated[0].tensors)
    other = replace(model, units=(model.root, replace(model.repeated[0], tensors=turned)))
    first, second = (
        timed(setup("zero0", Mesh(tp=tp), model=shape, sequence=2048, checkpointing="none")) for shape in (model, other)
    )
    assert first.step_s == pytest.approx(second.step_s)


def test_learned_positions_are_where_the_embedding_is() -> None:
    model = gpt(4, 1024, 16)
    positions = TensorShape("positions", (65536, 1024), "vector")
    model = replace(model, units=(replace(model.root, tensors=(*model.root.tensors, positions)), *model.repeated))
    with_them = setup("zero0", Mesh(pp=2), model=model, sequence=1024, micro_batches=2, framework=Framework("megatron"))
    without = replace(with_them, model=gpt(4, 1024, 16))
    more = [
        sum(term.value for term in state_terms(with_them, stage))
        - sum(term.value for term in state_terms(without, stage))
        for stage in (0, 1)
    ]
    assert more == [65536 * 1024 * 16, 0]


def test_the_band_is_what_the_evaluation_found() -> None:
    path = Path(__file__).parents[2] / "benchmarks/planner/results/accuracy.json"
    every = json.loads(path.read_text())["step"]["all"]
    assert pytest.approx(every["p90"], abs=0.02) == BAND
    assert timed(setup()).band == BAND


# -- arithmetic ------------------------------------------------------------------------------------------------


def test_an_interleaved_run_of_five_micro_batches_on_four_stages_has_a_time() -> None:
    """As Megatron-LM's own regression tests run it (`tp1_pp4_vp1_tunable_overlap`)."""
    options: dict[str, Any] = {"virtual_stages": 3, "model": llama(12), "checkpointing": "none"}
    found = {n: timed(setup("zero0", Mesh(pp=4), micro_batches=n, **options)).step_s for n in (4, 5, 8)}
    assert found[4] < found[5] < found[8]


def test_mesh_axes_and_the_links_they_cross() -> None:
    """8 x 4 x 2 x 2 = 128: tensor-parallel ranks are neighbours, pipeline stages are farthest apart."""
    mesh = Mesh(tp=8, dp_shard=4, dp_replicate=2, pp=2)
    assert mesh.world_size == 128
    groups = {axis: group_of(mesh, axis) for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp")}
    assert {axis: (group.size, group.stride) for axis, group in groups.items()} == {
        "tp": (8, 1), "cp": (1, 8), "dp_shard": (4, 8), "dp_replicate": (2, 32), "pp": (2, 64),
    }  # fmt: skip
    links = {axis: Network(device("h100")).link(group) for axis, group in groups.items() if group.size > 1}
    assert links == {"tp": "scaleup", "dp_shard": "internode", "dp_replicate": "internode", "pp": "internode"}
    assert Network(device("gb200")).link(groups["dp_shard"]) == "internode"  # 64 to 95, of which 72 are in a rack
    assert Network(device("gb200").in_hosts_of(64)).link(groups["dp_shard"]) == "scaleup"
    assert Network(device("4090")).link(groups["tp"]) == "pcie"
    assert Network(device("A40")).link(RankGroup("tp", 2, 1, 8)) == "scaleup"
    assert Network(device("A40")).link(RankGroup("tp", 4, 1, 8)) == "pcie"


@pytest.mark.parametrize(
    ("gpu", "group", "kind", "busbw"),
    [
        ("h100", RankGroup("dp_shard", 8, 1, 8), "all_gather", 361e9),
        ("h200", RankGroup("dp_shard", 8, 1, 8), "all_reduce", 480e9),
        ("a100", RankGroup("dp_shard", 8, 1, 8), "all_reduce", 235e9),
        ("h200", RankGroup("dp_shard", 32, 1, 32), "all_reduce", 365e9),
        ("b200", RankGroup("dp_shard", 8, 1, 8), "all_reduce", 761e9),
    ],
)
def test_bus_bandwidths_of_large_messages(gpu: str, group: RankGroup, kind: str, busbw: float) -> None:
    """Measured with nccl-tests and torch on 16 GiB (stas00/ml-engineering, network/README.md and benchmarks)."""
    sent = 16 * 2**30 * (group.size - 1) / group.size * (2 if kind == "all_reduce" else 1)
    seconds = Network(device(gpu)).move_s(UnitTransfer(kind, "", "data", When.LAST, sent, group))
    assert sent / seconds == pytest.approx(busbw, rel=0.25)


def test_a_ring_over_nodes_uses_all_their_network_cards() -> None:
    network = Network(device("h100"))
    assert network.bandwidth(RankGroup("dp_shard", 64, 1, 64)) == pytest.approx(8 * 50e9 * 0.9)
    assert network.bandwidth(RankGroup("dp_replicate", 8, 8, 64)) == pytest.approx(50e9 * 0.9)
    assert network.bandwidth(RankGroup("dp_shard", 16, 4, 64)) == pytest.approx(2 * 50e9 * 0.9)


@pytest.mark.parametrize(("ranks", "per_node", "cards"), [(9, 8, 1), (12, 8, 4), (16, 8, 8), (8, 3, 2)])
def test_a_ring_is_as_fast_as_the_host_with_fewest_of_its_ranks(ranks: int, per_node: int, cards: int) -> None:
    network = Network(device("h100").in_hosts_of(per_node))
    assert network.bandwidth(RankGroup("dp_shard", ranks, 1, ranks)) == pytest.approx(min(cards * 50e9 * 0.9, 360e9))


def test_latency_of_a_ring_grows_with_its_length() -> None:
    network = Network(device("h100"))
    small = [
        network.move_s(UnitTransfer("all_gather", "", "data", When.FORWARD, 1.0, RankGroup("dp_shard", n, 1, n)))
        for n in (64, 128, 512)
    ]
    assert (small[2] - small[0]) / (small[1] - small[0]) == pytest.approx((512 - 64) / (128 - 64))


REPEATS = {When.FORWARD: 1, When.BACKWARD: 1, When.REDUCE: 0, When.LAST: 1, When.UPDATE: 1}


def test_communication_behind_longer_blocks_shows_only_at_the_ends() -> None:
    moves = {When.FORWARD: 1.0, When.BACKWARD: 1.0, When.LAST: 2.0}
    found = block_exposure([BlockRow(10, 4.0, 8.0, moves)], REPEATS, prefetch=1, beside=True)
    assert found.total == 40 and found.exposed == 1 + (1 + 2)
    tight = block_exposure([BlockRow(10, 0.5, 2.5, moves)], REPEATS, prefetch=1, beside=True)
    assert tight.exposed == 1 + 9 * 0.5 + 3 + 9 * 0.5
    alone = block_exposure([BlockRow(10, 4.0, 8.0, moves)], REPEATS, prefetch=0, beside=True)
    assert alone.exposed == 10 + 10 + 2
    halves = [BlockRow(4, 0.5, 2.5, moves), BlockRow(6, 0.5, 2.5, moves)]
    assert block_exposure(halves, REPEATS, prefetch=1, beside=True) == tight


def test_the_last_reduction_is_of_the_first_block_that_has_a_backward() -> None:
    moves = {When.FORWARD: 1.0, When.BACKWARD: 1.0, When.LAST: 2.0}
    front = BlockRow(3, 4.0, 0.0, {When.FORWARD: 1.0}, has_backward=False)
    found = block_exposure([front, BlockRow(10, 4.0, 8.0, moves)], REPEATS, prefetch=1, beside=True)
    assert found.total == 43 and found.exposed == 1 + (1 + 2)


def test_what_a_step_gathers_comes_while_the_next_forward_computes() -> None:
    moves = {When.UPDATE: 1.0}
    assert block_exposure([BlockRow(10, 4.0, 8.0, moves)], REPEATS, prefetch=0, beside=True).exposed == 1
    assert block_exposure([BlockRow(10, 0.5, 2.5, moves)], REPEATS, prefetch=1, beside=True).exposed == 10 - 9 * 0.5


def test_silent_micro_batches_gather_but_do_not_reduce() -> None:
    moves = {When.FORWARD: 1.0, When.BACKWARD: 1.0, When.LAST: 2.0}
    repeats = {**REPEATS, When.FORWARD: 3, When.BACKWARD: 3}
    found = block_exposure([BlockRow(10, 4.0, 8.0, moves)], repeats, prefetch=1, beside=True)
    assert found.total == 3 * 10 + 3 * 10 + 20
    assert found.exposed == 3 * 1 + 2 * 1 + 3
    assert root_exposure(moves, repeats).exposed == 3 + 3 + 2


def test_sustained_rates() -> None:
    """200 to 240 TFLOP/s of an A100 and 550 to 620 of an H100; narrower formats gain what their peaks do."""
    a100, h100 = sustained_rate(device("A100"), "bf16"), sustained_rate(device("H100"), "bf16")
    assert a100 is not None and 200e12 < a100 < 245e12
    assert h100 is not None and 540e12 < h100 < 630e12
    fp8 = sustained_rate(device("H100"), "fp8")
    assert fp8 is not None and fp8 / h100 == pytest.approx(1402.6 / 794.5)
    assert matmul_rate(device("H100"), "fp4") is None
    assert math.isclose(matmul_rate(device("H20"), "bf16") or 0, 148e12 * 0.8)


def test_what_is_launched_again_follows_how_many_blocks_are_checkpointed() -> None:
    """In proportion: a third of a block's kernels for each that is, and nothing for the others."""
    asked = Request("llama3-8b", 8, "h100", "zero3", sequence=256)
    launches = {}
    for mode in ("none", "every_8", "every_2", "full"):
        terms = timed(build_setup(replace(asked, checkpointing=mode))).terms
        launches[mode] = next(term.value for term in terms if term.formula == "time.launch")
    none, full = launches["none"], launches["full"]
    assert none < launches["every_8"] < launches["every_2"] < full
    assert launches["every_2"] == pytest.approx((none + full) / 2, rel=0.05)


# -- ranks on the CPUs of one host -----------------------------------------------------------------------------


def on_cpus(cores: int | None, mesh: Mesh, **figures: Any) -> TimeFigures:
    """A step of eight micro-batches in all on a host whose messages take no time unless figures say so."""
    host = Device(
        "host", "cpu", {"fp32": 1e11}, memory_bandwidth=1e10, launch_s=1e-3, scaleup_bandwidth=1e18, scaleup_domain=4,
        per_node=4, measured=MeasuredHost(cores=cores, **figures),
    )  # fmt: skip
    made = Setup(
        llama(4, 256, 512, 4, 4), Cluster(host, 4), Plan.named("zero1"), mesh, sequence=256,
        micro_batches=8 // mesh.batch_ranks, precision=PRECISIONS["fp32"],
    )  # fmt: skip
    return timed(made)


@pytest.mark.parametrize("cores", [1, 2])
def test_more_ranks_than_cores_take_turns(cores: int) -> None:
    """Four ranks on two cores take twice as long as on four, and as long as on more."""
    mesh = Mesh(dp_shard=4)
    alone = on_cpus(None, mesh).step_s
    assert on_cpus(cores, mesh).step_s == pytest.approx(4 / cores * alone)
    assert on_cpus(4, mesh).step_s == on_cpus(8, mesh).step_s == alone


def test_who_waits_leaves_the_core_to_others() -> None:
    """Of stages: what idles on four cores does not on one, where all that counts is the work."""
    stages, copies = Mesh(pp=2, dp_shard=2), Mesh(dp_shard=4)
    waiting = {term.name for term in on_cpus(4, stages).terms}
    assert "pipeline bubble" in waiting
    assert on_cpus(4, stages).step_s > 1.1 * on_cpus(4, copies).step_s
    assert on_cpus(1, stages).step_s == pytest.approx(on_cpus(1, copies).step_s, rel=0.05)


def test_what_is_measured_of_messages_counts_for_each() -> None:
    """A unit's gather and sum cost what a call does and what the engine does around it, others a call alone."""
    mesh = Mesh(dp_shard=4)
    plain, calls, units = (on_cpus(1, mesh, **figures).step_s for figures in ({}, {"call_s": 1e-3}, {"unit_s": 1e-3}))
    exchanges = round((calls - plain) / 4e-3)  # by each of four ranks on one core
    assert exchanges == 2 * 5  # a sum and a gather of each of five units
    assert units == pytest.approx(calls)
    split = Mesh(dp_shard=2, tp=2)
    more = [on_cpus(1, split, **figures).step_s for figures in ({}, {"call_s": 1e-3}, {"unit_s": 1e-3})]
    assert more[1] - more[0] > 3 * (more[2] - more[0])


def rate_of_attention(gpu: str, kernel: Any = "flash", sequence: int = 16384, head_dim: int = 128) -> float:
    asked = build_setup(Request("llama3-8b", 8, gpu, "zero3", attention=kernel, sequence=sequence))
    (block,) = (unit.block for unit in asked.model.repeated)
    assert block is not None
    return attention_rate(asked, replace(block, head_dim=head_dim, value_dim=head_dim))


def test_attention_is_as_fast_as_its_kernel_on_devices_that_it_is_made_for() -> None:
    """Forward and backward, causal, 128 channels, 16,384 tokens of an H100: cuDNN 526, FlashAttention-2 319 TFLOP/s."""
    assert rate_of_attention("h100") == pytest.approx(319e12, rel=0.1)
    assert rate_of_attention("h100", "cudnn") == pytest.approx(526e12, rel=0.05)
    assert rate_of_attention("h100", "flash3") == pytest.approx(576e12, rel=0.05)  # arXiv 2407.08608
    assert 1.3 < rate_of_attention("a100") / rate_of_attention("a100", "triton") < 2.5  # arXiv 2307.08691
    for kernel in ("cudnn", "flash3"):
        with pytest.raises(BadInput, match=rf"attention {kernel} .* A100.* has not.* Use flash"):
            rate_of_attention("a100", kernel)


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "published"),
    [
        (1024, 1024, 1024, 119),
        (2048, 2048, 2048, 222),
        (4096, 4096, 4096, 228),
        (8192, 8192, 8192, 254),
        (16384, 16384, 16384, 257),
        (802816, 192, 768, 158),
    ],
)
def test_products_lose_to_their_shapes_what_kernels_do(rows: int, columns: int, depth: int, published: float) -> None:
    """TFLOP/s in fp16 on an A100 (Azure/AI-benchmarking-guide)."""
    flops = 2.0 * rows * columns * depth
    assert 257 * flops / product(1, rows, columns, depth) == pytest.approx(published, rel=0.11)


def test_a_capped_device_multiplies_as_fast_as_its_power_allows() -> None:
    """H100 at 500 W: 546 to 585 TFLOP/s in bf16, 1,083 to 1,141 in fp8 (pytorch/FBGEMM#2546)."""
    asked = Request("llama3-8b", 8, "h100", sequence=4096)
    capped = build_setup(replace(asked, watts=500)).cluster.device
    assert sustained_rate(capped, "bf16") == pytest.approx(569e12, rel=0.08)
    assert sustained_rate(capped, "fp8") == pytest.approx(1117e12, rel=0.16)
    assert timed(build_setup(replace(asked, watts=500))).step_s > 1.05 * timed(build_setup(asked)).step_s
    with pytest.raises(BadInput, match=r"watts is 5, and .* takes 700: it cannot be capped so far. Give 175 or more"):
        build_setup(replace(asked, watts=5))
    with pytest.raises(BadInput, match=r"watts is 1000, and .* may draw 700: a cap lies below"):
        build_setup(replace(asked, watts=1000))


def test_a_host_that_launches_faster_shortens_the_steps_of_small_models() -> None:
    asked = Request("gpt2", 1, "a100", sequence=512)
    slow, usual, fast = (timed(build_setup(replace(asked, launch_s=each))) for each in (2.8e-3, None, 1e-3))
    assert slow.step_s == usual.step_s > 1.5 * fast.step_s
    assert usual.bound_by == "kernel launches"


def test_widths_that_are_no_multiple_of_eight_are_slow() -> None:
    """GPT-2 with 50,304 tokens instead of 50,257 trains about 25 % faster (karpathy/nanoGPT)."""
    padded, odd = (
        timed(
            build_setup(Request(GPT2 | {"vocab_size": vocab}, 1, "a100", sequence=1024, micro_batch=12, compile=True))
        )
        for vocab in (50304, 50257)
    )
    assert odd.step_s / padded.step_s == pytest.approx(1.25, abs=0.1)


@pytest.mark.parametrize(
    ("gpu", "head_dim", "published"),
    [
        ("a100", 64, (88, 140, 165, 171)),
        ("a100", 128, (99, 155, 182, 189)),
        ("h100", 64, (141, 232, 273, 284)),
        ("h100", 128, (163, 265, 308, 328)),
    ],
)
def test_flash_attention_is_slower_on_short_sequences_and_narrow_heads(
    gpu: str, head_dim: int, published: tuple[int, ...]
) -> None:
    """Dao-AILab/flash-attention assets: causal, forward and backward, TFLOP/s at 512 to 16,384 tokens."""
    found = [rate_of_attention(gpu, sequence=tokens, head_dim=head_dim) for tokens in (512, 2048, 8192, 16384)]
    assert found == pytest.approx([1e12 * rate for rate in published], rel=0.08)
    uneven = rate_of_attention(gpu, head_dim=head_dim + 16)
    assert uneven == pytest.approx(rate_of_attention(gpu, head_dim=head_dim + 32), rel=0.25)
    assert uneven < rate_of_attention(gpu, head_dim=head_dim + 32), "heads are rounded up to multiples of 32 channels"


def test_attention_over_shared_sequences_costs_what_its_tiles_are_put_together_for() -> None:
    """Each rank's part of one sequence alone would be a quarter; heads are shared at no such cost."""
    whole = setup(mesh=Mesh(dp_shard=8))
    block = whole.model.repeated[0].block
    assert block is not None
    shared = {mode: replace(whole, mesh=Mesh(dp_shard=2, cp=4), context=mode) for mode in ("ulysses", "gather", "ring")}
    seconds = {mode: attention_seconds(each, block) for mode, each in shared.items()}
    assert seconds["ulysses"] == pytest.approx(attention_seconds(whole, block) / 4)
    assert seconds["ulysses"] < seconds["gather"] < seconds["ring"]
    per_query = attention_bytes(shared["ring"], block) / (whole.tokens / 4)
    assert per_query == 4 * (4096 * 36 + 2 * 1024 * 10), "four tiles of queries, keys and values"


def test_the_flops_of_products_are_counted_and_not_made_of_their_seconds() -> None:
    """6 for each element and token, by hand, also where blocks multiply in fp8 and the head in 16 bits."""
    host = Device("a host", kind="cpu", peak_flops={"fp8": 2e12, "bf16": 1e12}, memory_bandwidth=1e11)
    made = replace(build_setup(Request("llama3-8b", 1, strategy="zero0", precision="fp8", gpu=host)), micro_batches=2)
    time = time_of(made)
    assert isinstance(time, TimeFigures)
    (products,) = (term for term in time.terms if term.formula == "time.matmul")
    elements = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128_256 * 4096
    assert products.inputs["flops"] == pytest.approx(6 * elements * 2 * 4096)
    assert products.inputs["flops"] / products.inputs["sustained_flops"] == pytest.approx(products.value)


def test_a_rank_of_more_than_there_are_key_heads_keeps_and_computes_one() -> None:
    """Of 8 key heads of 128 channels 16 ranks along tp have one each, as 8 have: half a head there is none."""
    eight, sixteen = (build_setup(Request("llama3-8b", 16, strategy="zero1", tp=tp)) for tp in (8, 16))
    (block,) = (unit.block for unit in eight.model.repeated)
    assert block is not None
    item, tokens = 2, 4096
    keys_and_values = tokens * 2 * 128 * item
    halved = block_activations(replace(eight, sequence_parallel=True), block).saved - keys_and_values
    assert block_activations(sixteen, block).saved == pytest.approx(halved / 2 + keys_and_values)
    on_cpu = Device("a host", kind="cpu", peak_flops={"bf16": 1e12}, memory_bandwidth=1e11)
    flops = [
        block_seconds(replace(each, cluster=Cluster(on_cpu, 16)), each.model.repeated[0]).matmul_flops
        for each in (eight, sixteen)
    ]
    keys = 6 * tokens * 2 * 128 * 4096
    assert flops[1] == pytest.approx((flops[0] - keys) / 2 + keys)


def test_one_block_in_n_is_the_first_of_each_n_in_time_memory_and_traffic() -> None:
    """Of 32 blocks and N = 5 seven, as the engine wraps them: 0, 5, 10 and so on."""
    none, full, fifth = (
        build_setup(Request("llama3-8b", 8, strategy="zero1", tp=2, checkpointing=mode))
        for mode in ("none", "full", "every_5")
    )
    for count in (
        repeated_flops_per_token,
        lambda made: sum(block_activations(made, unit.block).saved for unit in made.model.repeated if unit.block),
        lambda made: sum(term.value for term in traffic_of(made).collectives if term.purpose == "tensor"),
        lambda made: sum(term.value for term in PipelineRank(made, 0).pass_terms() if term.formula == "time.recompute"),
    ):
        assert count(fifth) == pytest.approx(count(none) + 7 / 32 * (count(full) - count(none)))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(270_570, "75.2 h"), (7.2e6, "2,000 h"), (3069, "3,069 s"), (1.234, "1.23 s"), (0.0456, "45.6 ms")],
)
def test_seconds_are_said_in_a_unit_that_can_be_read(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
