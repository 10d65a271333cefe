"""Tensor and context parallelism: what the planner says from shapes alone, against what ranks hold and send."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import PRECISIONS, Plan, checkpoint_activations, engine_of, estimate
from terrazzo.engine.plan.place import ON_DEVICE
from terrazzo.parallel import TensorRanks, context_of
from terrazzo.parallel.simulated_ranks import cut_simulated
from terrazzo.parallel.transformers_support import CUT_MATRICES, NO_STAGES
from terrazzo.planner.layout.buckets import buckets
from terrazzo.planner.layout.placement import placement_of
from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.peak import rank_peak
from terrazzo.planner.memory.states import state_terms
from terrazzo.planner.memory.trace import traced_activations
from terrazzo.planner.model.families import FAMILIES
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.model.shapes import BUILT_IN
from terrazzo.planner.setup.build_setup import build_setup
from terrazzo.planner.setup.checks import check
from terrazzo.planner.setup.framework import Framework
from terrazzo.planner.setup.optimizers import OPTIMIZERS
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.traffic.volumes import expected_exchanges, expected_rows_bytes, traffic_of
from terrazzo.train.model.causal_lm import build_model
from terrazzo.train.model.decoder import Block, Decoder, DecoderConfig
from terrazzo.train.model.experts import MixtureConfig, Router, routers_of
from tests.engine.toys import EVERY_PLAN, TABLE_2D
from tests.helpers.cover import places
from tests.helpers.fake import fake_group
from tests.helpers.threads import run_in_threads

LENGTH = 32
SIZES = DecoderConfig(62, dim=32, layers=3, heads=4, kv_heads=2, ffn_dim=48, max_sequence_length=LENGTH)
LLAMA = {
    "model_type": "llama", "vocab_size": 62, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run of one micro-batch on the ranks that its axes make."""

    axes: tuple[tuple[str, int], ...]
    plan: str = "zero3"
    mode: Any = "gather"
    sequence: bool = True
    checkpointing: Any = "none"
    every: int = 1
    precision: str = "fp32"
    family: str = ""
    experts: int = 0

    @property
    def mesh(self) -> Mesh:
        return Mesh(**dict(self.axes))

    @property
    def setup(self) -> Setup:
        config = LLAMA | {"model_type": self.family} if self.family else OURS if not self.experts else OURS | MIXTURE
        ranks = self.mesh.world_size
        return Setup(
            model_shape(config),
            Cluster(Device("host", kind="cpu", per_node=ranks), ranks),
            Plan.named(self.plan),
            self.mesh,
            sequence=LENGTH,
            micro_batch=2,
            precision=PRECISIONS[self.precision],
            checkpointing=self.checkpointing,
            every=self.every,
            context=self.mode,
            sequence_parallel=self.sequence,
        )

    @property
    def base(self) -> nn.Module:
        return base(self.family, self.experts)


OURS = {name: each for name, each in asdict(SIZES).items() if name != "experts"} | {"model_type": "terrazzo"}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
TP, CP, TP4 = (("tp", 2),), (("cp", 2),), (("tp", 4),)
BOTH, DATA = (("cp", 2), ("tp", 2)), (("dp_shard", 2), ("tp", 2))
CASES = [
    Case(TP),
    Case(TP, "zero0", sequence=False, family="qwen3", checkpointing="full"),
    Case(TP, "zero2", checkpointing="selective", every=2, precision="bf16"),
    Case(TP4, checkpointing="full", every=3),  # fewer key heads than ranks, and a vocabulary that does not divide
    Case(DATA, "zero1", precision="bf16-pure"),
    Case((("dp_replicate", 2), ("cp", 2)), "hfsdp"),
    Case(CP, checkpointing="selective"),
    Case(CP, "zero1", "ulysses", checkpointing="full"),
    Case((("cp", 4),), "zero3", "ulysses"),  # fewer key heads than ranks
    Case((("cp", 4),), "zero2", "ring", checkpointing="full", every=2, precision="bf16"),
    Case(BOTH, "shard_grad_op", "ring"),
    Case(BOTH, "zero3", "ulysses", precision="bf16"),
    Case(BOTH, "zero3", family="llama", checkpointing="full"),
    Case(BOTH, "zero3", family="phi3"),  # ranks along tp compute the whole attention
    Case(TP, "zero1", checkpointing="full", experts=4),
    Case((*TP, ("ep", 2)), experts=4),
    Case((*TP4, ("ep", 2)), "zero2", precision="bf16", experts=4),  # experts are split, and nothing else
    Case((*DATA, ("ep", 2)), "zero3", checkpointing="selective", every=2, experts=4),
    Case((*DATA, ("ep", 4)), "shard_grad_op", precision="bf16", experts=4),
    Case((*DATA, ("dp_replicate", 2), ("ep", 4)), "hpz", precision="bf16", experts=4),
    Case((*DATA, ("dp_replicate", 2), ("ep", 2)), "hfsdp", checkpointing="full", experts=4),
    Case((*BOTH, ("ep", 2)), "zero1", "ulysses", experts=4),
    pytest.param(
        Case((*DATA, ("cp", 2), ("ep", 4)), "zero3", precision="bf16-pure", experts=4), marks=pytest.mark.long
    ),
]


@cache
def base(family: str, experts: int) -> nn.Module:
    if family:
        return build_model(LLAMA | {"model_type": family, "pad_token_id": 0})
    model = Decoder(replace(SIZES, experts=MixtureConfig(experts, 2, 24, 1) if experts else None))
    for _, router in routers_of(model):
        router.__class__ = EvenRouter
    return model


class EvenRouter(Router):
    """Gives all experts as many rows."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.arange(len(x) * self.config.top_k).view(len(x), -1) % self.config.count
        weights = F.linear(x.float(), self.weight.float()).gather(-1, chosen)
        return weights, chosen, torch.bincount(chosen.flatten(), minlength=self.config.count)


def run(case: Case, rank: int) -> tuple[dict[str, int], dict[str, int], int]:
    """What a step has sent, by name; what the bill says; and the bytes of states that are held."""
    model: Any = copy.deepcopy(case.base)
    blocks = [type(model.model.layers[0])] if case.family else [Block]
    checkpoint_activations(model, case.checkpointing, units=blocks, every=case.every)
    mesh = tz.mesh(**dict(case.axes))
    tz.parallelize(model, mesh, context=case.mode, sequence=case.sequence)
    context = context_of(model)
    optimizer: Any = torch.optim.AdamW(in_two_groups(model))
    model, optimizer = tz.shard(model, optimizer, case.plan, precision=case.precision, mesh=mesh)
    tokens, positions = torch.zeros(2, LENGTH, dtype=torch.int64), torch.arange(LENGTH).expand(2, -1)
    for _ in range(2):  # the first learns the order
        engine_of(model).traffic.reset()
        given = context.split(tokens, positions) if context else (tokens, positions)
        output = model(given[0], position_ids=given[1])
        (output.logits if case.family else output).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    sent = {name: sent for name, sent in engine.traffic.by_name().items() if sent and name != "control"}
    assert engine.traffic.total_wait_s > 0
    return sent, vars(engine.bill), engine.state_bytes()


def in_two_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if (p.ndim < 2) == small]} for small in (False, True)]


def shape(case: Case) -> dict[str, object]:
    """Where all states of a plan lie beside such axes is tried without ranks: test_memory_engine."""
    return {**vars(case), "axes": len(case.axes), "plan": places(case.plan)["weight"]}


def check_states(setup: Setup, bill: Mapping[str, int]) -> None:
    assert {term.name: term.value for term in state_terms(setup, 0)} == {
        "weights": bill["weight_bytes"],
        "gradients": bill["grad_bytes"],
        "master": bill["master_bytes"],
        "moments": bill["moments_bytes"],
    }


def promised_traffic(setup: Setup) -> dict[str, int]:
    found = Counter(expected_exchanges(setup))
    for term in traffic_of(setup).collectives:
        found[term.name.split()[0]] += round(term.value) * (term.purpose == "data")
    found["ep all_to_all"] += expected_rows_bytes(setup)
    return {name: sent for name, sent in found.items() if sent}


@pytest.mark.cover(strength=1, turns=3, case=shape)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_hold_and_send_what_was_promised(case: Case) -> None:
    """To the byte; of uneven parts those of the last rank along `tp`, and of those the first along data axes."""
    if case.family:
        pytest.importorskip("transformers", reason="needs terrazzo[hf]")
    check(case.setup)
    case.base  # noqa: B018 before there are threads
    ranks, setup = run_in_threads(case.mesh.world_size, lambda rank: run(case, rank)), case.setup
    for sent, _, _ in ranks:
        assert sent == promised_traffic(setup)
    _, bill, held = ranks[case.mesh.tp - 1]
    check_states(setup, bill)
    assert bill["weight_bytes"] + bill["master_bytes"] + bill["moments_bytes"] == held


def test_sums_of_micro_batches_go_to_the_host_of_all_experts_too() -> None:
    """Also where no two ranks have the same experts, so that nothing is summed over ranks before."""
    case, micro_batches = Case((("dp_shard", 2), ("ep", 2)), "zero2@cpu", experts=4), 3

    def committed(rank: int) -> list[int]:
        """Bytes that go to the host in each micro-batch of a step."""
        model: Any = copy.deepcopy(case.base)
        mesh = tz.mesh(**dict(case.axes))
        tz.parallelize(model, mesh)
        optimizer = torch.optim.AdamW(in_two_groups(model))
        model, _ = tz.shard(model, optimizer, case.plan, precision=case.precision, mesh=mesh)
        store, sent = engine_of(model).store, [0] * micro_batches
        save = store.save
        for micro in range(micro_batches):

            def counted(state: Any, source: Any, micro: int = micro) -> Any:
                sent[micro] += source.data.nbytes
                return save(state, source)

            store.save = counted
            with nullcontext() if micro == micro_batches - 1 else tz.accumulate(model):
                model(torch.zeros(2, LENGTH, dtype=torch.int64)).float().sum().backward()
        return sent

    setup = replace(case.setup, micro_batches=micro_batches)
    case.base  # noqa: B018 before there are threads
    copies = {term.name: term.value for term in traffic_of(setup).collectives if term.purpose == "offload"}
    for *earlier, last in run_in_threads(2, committed):
        assert copies["copy gradients to the host"] == sum(earlier) + last
        assert copies["copy gradients to the device"] == sum(earlier) > 0


@pytest.mark.parametrize("vocab_size", [62, 64])
def test_a_simulated_cut_is_that_of_the_last_rank(vocab_size: int) -> None:
    with fake_group(4, 3), torch.device("meta"):
        model, other = (Decoder(replace(SIZES, vocab_size=vocab_size)) for _ in range(2))
        tz.parallelize(model, tz.mesh(tp=4))
    cut_simulated(other, 4)
    assert {name: p.shape for name, p in other.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_a_trace_of_a_cut_model_has_parts_of_its_activations() -> None:
    """Of two ranks that split sequences too, about half, and no less: logits and what is put together stay whole."""
    peaks = {}
    for ranks in (1, 2):
        with torch.device("meta"):
            model = Decoder(SIZES)
        if ranks > 1:
            cut_simulated(model, ranks)
        trace = traced_activations(
            model,
            ["blocks.0", "blocks.1", "blocks.2"],
            torch.float32,
            lambda model: model(torch.zeros(2, LENGTH, dtype=torch.int64)).sum(),
        )
        assert sum(event.change for event in trace.events) == 0
        peaks[ranks] = trace.peak_bytes - trace.buffer_bytes
    assert 0.5 * peaks[1] < peaks[2] < 0.7 * peaks[1]


ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MIXTURES = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": ROUTED | {"shared_expert_intermediate_size": 20},
    "qwen3_moe": ROUTED,
}


def cut_tiny(family: str, size: int) -> tuple[nn.Module, TensorRanks, dict[str, Any]]:
    """A small model of transformers as the last of `size` ranks has it, with real memory, and its config."""
    import transformers

    kind = transformers.CONFIG_MAPPING[family]
    config = kind(
        vocab_size=62, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4 if family == "gpt_neox" else 2, head_dim=8, max_position_embeddings=LENGTH,
        tie_word_embeddings=False, pad_token_id=0, **MIXTURES.get(family, {}),
    )  # fmt: skip
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    ranks = cut_simulated(model, size)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    return model, ranks, config.to_dict()


@pytest.mark.parametrize("ep", [1, 2])
def test_parts_of_experts_are_cut_along_both_axes(ep: int) -> None:
    setup = build_setup(Request("mixtral-8x7b", 8, gpu="h100-sxm", tp=4, ep=ep))
    placement = placement_of(replace(setup, framework=Framework("megatron")), ON_DEVICE)
    unit = setup.model.repeated[0]
    experts = [
        (bucket, each) for bucket in buckets(unit, placement) for each in bucket.tensors if each.role == "expert"
    ]
    assert len(experts) > 1
    for bucket, tensor in experts:
        assert math.prod(bucket.part(tensor)) == bucket.share(tensor) == tensor.numel // (4 * ep)


@pytest.mark.parametrize("family", sorted(CUT_MATRICES))
@pytest.mark.parametrize("size", [2, 4])
def test_a_request_with_tp_means_what_transformers_plan_makes_of_a_family(family: str, size: int) -> None:
    """Parts of every parameter, and bytes of every exchange; 2 key heads on 4 ranks."""
    pytest.importorskip("transformers", reason="needs terrazzo[hf]")
    model, ranks, config = cut_tiny(family, size)
    asked = Request(config, size, tp=size, sequence=LENGTH, micro_batch=2, precision="fp32", loss="full")
    setup = build_setup(asked)
    check(setup)
    placement = placement_of(setup, ON_DEVICE)
    planned = [
        bucket.share(tensor)
        for unit in setup.model.units
        for bucket in buckets(unit, placement)
        for tensor in bucket.tensors * unit.count
    ]
    assert sorted(planned) == sorted(parameter.numel() for parameter in model.parameters())
    tokens, positions = torch.zeros(2, LENGTH, dtype=torch.int64), torch.arange(LENGTH).expand(2, -1)
    model(tokens, position_ids=positions, use_cache=False).logits.sum().backward()
    assert {f"tp {name}": sent for name, sent in ranks.traffic.by_name().items() if sent} == expected_exchanges(setup)


def test_families_with_a_plan_are_those_that_transformers_cuts_with_known_styles() -> None:
    """But for those whose queries and keys are put together for a norm over all heads, which the engine refuses, and
    for latent attention, whose rows say no splits.
    """
    transformers = pytest.importorskip("transformers", reason="needs terrazzo[hf]")
    plans = {
        family: transformers.CONFIG_MAPPING[family].base_model_tp_plan for family in FAMILIES if family != BUILT_IN
    }
    known = {"colwise", "rowwise", "embedding_rowwise", "colwise_gather_output", "rowwise_split_input"}
    known |= {"replicated_with_grad_allreduce", "sequence_parallel", "replicate"}
    cut = {family for family, plan in plans.items() if plan and {*_beside_experts(plan).values()} <= known}
    assert cut - {"olmo2", "olmo3", "olmoe", "deepseek_v3"} == CUT_MATRICES


def _beside_experts(plan: dict[str, str]) -> dict[str, str]:
    """Without a mixture's experts and their stacks, which the engine leaves whole."""
    experts = [glob for glob, style in plan.items() if style == "moe_tp_experts"]
    return {
        glob: style for glob, style in plan.items() if not any(f"{glob}.".startswith(f"{each}.") for each in experts)
    }


def test_families_without_stages_are_those_that_transformers_has_no_line_of() -> None:
    transformers = pytest.importorskip("transformers", reason="needs terrazzo[hf]")
    families = FAMILIES.keys() - {BUILT_IN}
    without = {family for family in families if not transformers.CONFIG_MAPPING[family].base_model_pp_plan}
    assert without == NO_STAGES


MESHES = [(("dp_shard", 2), ("tp", 4)), (("dp_replicate", 2), ("dp_shard", 2), ("cp", 2), ("tp", 2))]


@pytest.mark.cover(plan=places)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
@pytest.mark.parametrize(
    ("axes", "plan"), [(axes, plan) for axes in MESHES for plan in EVERY_PLAN if len(axes) > 2 or plan not in TABLE_2D]
)
def test_the_bill_of_a_model_that_nobody_builds(axes: tuple[tuple[str, int], ...], plan: str, precision: str) -> None:
    """On the meta device, where the other ranks are none."""
    case = Case(axes, plan, precision=precision)
    ranks, sizes = case.mesh.world_size, replace(SIZES, vocab_size=64)
    shape = model_shape({"model_type": "terrazzo", **asdict(sizes)})
    setup = replace(case.setup, model=shape, cluster=Cluster(Device("gpu"), ranks))
    with fake_group(ranks):
        with torch.device("meta"):
            model = Decoder(sizes)
        mesh = tz.mesh(**dict(axes))
        tz.parallelize(model, mesh)
        bill = estimate(model, torch.optim.AdamW(in_two_groups(model)), plan, mesh=mesh, precision=precision)
    check_states(setup, vars(bill))
    assert rank_peak(setup, 0, states_only=True).total == bill.transient_bytes


@pytest.mark.parametrize(("axes", "plan"), [*zip(MESHES, ("zero3", "hybrid_shard"), strict=True), (MESHES[0], "zero0")])
def test_the_bill_of_whole_matrices_that_ranks_have_parts_of(axes: tuple[tuple[str, int], ...], plan: str) -> None:
    case, sizes = Case(axes, plan), replace(SIZES, vocab_size=64)
    shape = model_shape({"model_type": "terrazzo", **asdict(sizes)})
    cluster = Cluster(Device("gpu"), case.mesh.world_size)
    setup = replace(case.setup, model=shape, cluster=cluster, optimizer=OPTIMIZERS["muon"])
    with fake_group(case.mesh.world_size):
        with torch.device("meta"):
            model = Decoder(sizes)
        mesh = tz.mesh(**dict(axes))
        tz.parallelize(model, mesh)
        matrices, others = tz.optim.hidden_matrices(model)
        groups = [{"params": [each for each in others if (each[1].ndim < 2) == flat]} for flat in (False, True)]
        bill = estimate(model, tz.optim.Muon(matrices, groups), plan, mesh=mesh)
    check_states(setup, vars(bill))
    assert rank_peak(setup, 0, states_only=True).total == bill.transient_bytes
