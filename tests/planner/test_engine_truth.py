"""The planner against the engine itself: bytes of every state as they lie in memory, and every byte that was sent."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import terrazzo as tz
from terrazzo.engine import PRECISIONS, Plan, Precision, engine_of, find_units
from terrazzo.planner.machine.devices import Cluster, Device
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.memory.peak import memory_of, rank_peak
from terrazzo.planner.memory.replay import replay
from terrazzo.planner.memory.states import state_terms
from terrazzo.planner.memory.trace import traced_activations
from terrazzo.planner.model.adapters import with_ends, with_frozen
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.model.shapes import ModelShape
from terrazzo.planner.setup.choice_names import strategy
from terrazzo.planner.setup.setup import Setup
from terrazzo.planner.traffic.volumes import traffic_of
from terrazzo.train.model.causal_lm import build_model
from terrazzo.train.model.decoder import DecoderConfig
from tests.engine.census import census, live_bytes
from tests.engine.toys import EVERY_PLAN, TABLE_2D, on_ranks
from tests.helpers.cover import places
from tests.helpers.fake import fake_group

SIZES = {"vocab_size": 61, "dim": 24, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 40, "max_sequence_length": 16}
LLAMA = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "decoder": {"model_type": "terrazzo", **SIZES, "tie_embeddings": True},
    "decoder, untied": {"model_type": "terrazzo", **SIZES, "tie_embeddings": False},
    "llama": LLAMA,
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4},
    "mixture": {
        **LLAMA, "model_type": "qwen3_moe", "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
MIXED: dict[str, Precision] = {
    **PRECISIONS,
    "fp32 weights, bf16 sums": Precision(weight="fp32", compute="bf16", reduce="bf16", accumulate="bf16"),  # type: ignore[arg-type]
    "sums in int4": Precision(weight="bf16", compute="bf16", quantized_reduce="int4"),  # type: ignore[arg-type]
    "gathered in int8": Precision(weight="bf16", compute="bf16", gather="int8"),  # type: ignore[arg-type]
    "narrow moments": Precision(weight="bf16", compute="bf16", reduce="bf16", moments="bf16"),  # type: ignore[arg-type]
}
WORLDS = {1: (1, 1), 2: (1, 2), 6: (2, 3), 8: (2, 4)}  # ranks: replicas × shards


def built(name: str) -> nn.Module:
    """The model of a config, by the trainer's own way of building it."""
    config = CONFIGS[name]
    if name.startswith("decoder"):
        return build_model(DecoderConfig(**{key: value for key, value in config.items() if key != "model_type"}))
    pytest.importorskip("transformers", reason="needs terrazzo[hf]")
    return build_model(config)


def frozen(name: str) -> nn.Module:
    """The same with its embedding, and half of the first block, frozen."""
    model = built(name)
    parameters = dict(model.named_parameters())
    for parameter in list(parameters.values())[:4]:
        parameter.requires_grad_(False)
    return model


def frozen_in_front(config: Mapping[str, Any]) -> tuple[nn.Module, ModelShape]:
    """A decoder whose embedding and first two blocks of three are frozen, and its shape."""
    model = build_model(DecoderConfig(**{key: value for key, value in config.items() if key != "model_type"}))
    patterns = ("embed*", "blocks.[01].*")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    shape = with_ends(with_frozen(model_shape(dict(config)), patterns))
    assert [(unit.count, unit.forward_only) for unit in shape.repeated] == [(2, True), (1, False)]
    return model, shape


def setup_of(shape: ModelShape, plan: str, precision: Precision, world: int, **options: Any) -> Setup:
    replicas, shards = grid(plan, world)
    cluster = Cluster(Device("host", kind="cpu", per_node=1), world)
    mesh = Mesh(dp_replicate=replicas, dp_shard=shards)
    return Setup(
        shape, cluster, Plan.named(plan), mesh, sequence=8, precision=precision, **{"micro_batches": 1, **options}
    )


def grid(plan: str, world: int) -> tuple[int, int]:
    return WORLDS[world] if plan in TABLE_2D else (1, world)


def device_mesh(plan: str, world: int) -> Any:
    if plan not in TABLE_2D:
        return None
    return init_device_mesh("cpu", WORLDS[world], mesh_dim_names=("dp_replicate", "dp_shard"))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """In two groups, as the trainer has it."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2]]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-2)


def loss_of(model: nn.Module) -> torch.Tensor:
    output = model(torch.zeros((1, 8), dtype=torch.int64))
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return logits.float().square().mean()


def backward(model: nn.Module) -> None:
    loss_of(model).backward()


RUNS = [(plan, world) for world in WORLDS for plan in EVERY_PLAN if plan not in TABLE_2D or world in (6, 8)]


def held_bytes(model: nn.Module, plan: str, precision: Precision, world: int) -> dict[str, int]:
    """What each state takes of this process's memory, as storages that tensors refer to, at points of a step."""
    outside = live_bytes() - sum(parameter.nbytes for parameter in model.parameters())
    optimizer = adamw(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tz.Precision: .* changes nothing")  # on one rank, or where all is whole
        model, optimizer = tz.shard(model, optimizer, plan, precision=precision, mesh=device_mesh(plan, world))
    at_rest = live_bytes() - outside
    backward(model)
    with_gradients = live_bytes() - outside
    optimizer.step()
    optimizer.zero_grad()
    return {
        "weights and master": at_rest,
        "gradients": with_gradients - at_rest,
        "moments": live_bytes() - outside - at_rest,
    }


def promised_bytes(setup: Setup) -> dict[str, float]:
    terms = {term.name: term.value for term in state_terms(setup, 0)}
    return {
        "weights and master": terms["weights"] + terms.get("master", 0),
        "gradients": terms["gradients"],
        "moments": terms["moments"],
    }


def without_scaling(precision: Precision) -> Precision:
    """So that no step is skipped."""
    return replace(precision, loss_scaling=None)


EVERY_PRECISION = [("decoder", precision) for precision in MIXED]
SOME = [(name, precision) for name in CONFIGS for precision in ("fp32", "bf16") if name != "decoder"]


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize(("plan", "world"), RUNS)
@pytest.mark.parametrize(("name", "precision"), EVERY_PRECISION + SOME)
def test_states_are_exact(name: str, precision: str, plan: str, world: int) -> None:
    """Every plan, on groups of one rank to eight, from the config alone."""
    kind = without_scaling(MIXED[precision])
    with fake_group(world), census():
        held = held_bytes(built(name), plan, kind, world)
    assert promised_bytes(setup_of(model_shape(CONFIGS[name]), plan, kind, world)) == held


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("plan", "world"), [run for run in RUNS if run[1] in (2, 8)])
@pytest.mark.parametrize("name", ["decoder", "llama", "gpt2"])
def test_states_of_partly_frozen_models_are_exact(name: str, plan: str, world: int, precision: str) -> None:
    kind, shape = PRECISIONS[precision], model_shape(frozen(name))
    with fake_group(world), census():
        held = held_bytes(frozen(name), plan, kind, world)
    assert promised_bytes(setup_of(shape, plan, kind, world)) == held


def sent_bytes(model: Any, optimizer: Any, micro_batches: int, local: bool | None) -> dict[str, int]:
    """By kind of collective, what the second step sent; flags and norms apart."""
    for _ in range(2):
        engine_of(model).traffic.reset()
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with contextlib.nullcontext() if last else tz.accumulate(model, local=local):
                backward(model)
        optimizer.step()
        optimizer.zero_grad()
    return {kind: sent for kind, sent in engine_of(model).traffic.bytes.items() if kind != "control" and sent}


def promised_traffic(setup: Setup) -> dict[str, float]:
    found: Counter[str] = Counter()
    for term in traffic_of(setup).collectives:
        found[term.name.split()[0]] += term.value  # type: ignore[assignment]
    return {kind: sent for kind, sent in found.items() if sent}


ACCUMULATION: Mapping[str, tuple[int, bool | None]] = {
    "one micro-batch": (1, None),
    "three": (3, None),
    "three, summed locally": (3, True),
}


def check_traffic(
    model: nn.Module, shape: ModelShape, plan: str, precision: str, world: int, accumulation: str
) -> None:
    micro_batches, local = ACCUMULATION[accumulation]
    with fake_group(world):
        model, optimizer = tz.shard(
            model, adamw(model), plan, precision=without_scaling(MIXED[precision]), mesh=device_mesh(plan, world)
        )
        options = {"micro_batches": micro_batches, "accumulate_locally": local is True}
        setup = setup_of(shape, plan, MIXED[precision], world, **options)
        assert promised_traffic(setup) == sent_bytes(model, optimizer, micro_batches, local)


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize(("plan", "world"), RUNS)
@pytest.mark.parametrize(("name", "precision"), [*EVERY_PRECISION, ("gpt2", "bf16"), ("mixture", "bf16")])
def test_traffic_is_exact(name: str, precision: str, plan: str, world: int, accumulation: str) -> None:
    check_traffic(built(name), model_shape(CONFIGS[name]), plan, precision, world, accumulation)


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_traffic_of_a_partly_frozen_model_is_exact(plan: str, accumulation: str) -> None:
    model = frozen("decoder, untied")
    check_traffic(model, model_shape(frozen("decoder, untied")), plan, "bf16", 8, accumulation)


@pytest.mark.parametrize("accumulation", ["one micro-batch", "three"])
@pytest.mark.parametrize("plan", ["zero1", "zero3", "hybrid_shard"])
def test_no_weights_come_again_for_blocks_that_no_gradient_goes_back_through(plan: str, accumulation: str) -> None:
    model, shape = frozen_in_front(CONFIGS["decoder, untied"])
    check_traffic(model, shape, plan, "bf16", 8, accumulation)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_ranks_that_really_talk_send_what_was_promised(plan: str) -> None:
    """Four ranks as threads: no rank sends anything else."""
    shape, kind = model_shape(CONFIGS["decoder"]), PRECISIONS["bf16"]
    mesh = Mesh(dp_replicate=2, dp_shard=2) if plan in TABLE_2D else Mesh(dp_shard=4)
    base = built("decoder")

    def body(rank: int) -> dict[str, int]:
        axes = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")) if plan in TABLE_2D else None
        )
        model = copy.deepcopy(base)
        model, optimizer = tz.shard(model, adamw(model), plan, precision=kind, mesh=axes)
        return sent_bytes(model, optimizer, 2, None)

    setup = Setup(
        shape,
        Cluster(Device("host", kind="cpu"), 4),
        Plan.named(plan),
        mesh,
        sequence=8,
        micro_batches=2,
        precision=kind,
    )
    assert on_ranks(4, body) == [promised_traffic(setup)] * 4


def test_a_thousand_ranks_are_exact_too() -> None:
    shape, kind = model_shape(CONFIGS["decoder"]), PRECISIONS["bf16"]
    for plan in ("zero1", "zero3"):
        with fake_group(1024), census():
            held = held_bytes(built("decoder"), plan, kind, 1024)
        cluster = Cluster(Device("host", kind="cpu"), 1024)
        setup = Setup(shape, cluster, Plan.named(plan), Mesh(dp_shard=1024), sequence=8, precision=kind)
        assert promised_bytes(setup) == held, plan


@pytest.mark.cover(strength=1, plan=places)
@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.parametrize("name", ["decoder", "gpt2"])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_transient_memory_is_that_of_the_engines_own_bill(
    plan: str, name: str, precision: str, accumulation: str
) -> None:
    """Gathered weights and gradients on their way; a group that moves nothing receives nothing, as on a GPU."""
    check_transient(built(name), model_shape(CONFIGS[name]), plan, MIXED[precision], accumulation)


@pytest.mark.cover(strength=1, turns=2, plan=places)
@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_transient_memory_of_a_model_that_is_frozen_in_front_is_that_of_the_bill(plan: str, accumulation: str) -> None:
    """Tables are frozen, the head is trained: no backward comes to the first two blocks of three."""
    model, shape = frozen_in_front(CONFIGS["decoder, untied"])
    check_transient(model, shape, plan, PRECISIONS["bf16"], accumulation)


def test_a_trace_has_no_backward_of_blocks_that_are_frozen_in_front() -> None:
    """Without its activations it is the engine's bill; more would be held where the last of these came once more."""
    model, shape = frozen_in_front(CONFIGS["decoder, untied"])
    trace = traced_activations(copy.deepcopy(model), find_units(model, None)[0], torch.bfloat16, loss_of)
    quiet = replace(trace, events=tuple(replace(event, rise=0, change=0) for event in trace.events), buffer_bytes=0)
    with fake_group(8):
        model, _ = tz.shard(model, adamw(model), "zero3", precision="bf16")
        bill = engine_of(model).bill
    setup = replace(setup_of(shape, "zero3", PRECISIONS["bf16"], 8), cluster=Cluster(Device("device"), 8))
    assert replay(setup, quiet).parts["transient"] == bill.transient_bytes


def check_transient(model: nn.Module, shape: ModelShape, plan: str, precision: Precision, accumulation: str) -> None:
    micro_batches, local = ACCUMULATION[accumulation]
    with fake_group(8):
        model, _ = tz.shard(model, adamw(model), plan, precision=precision, mesh=device_mesh(plan, 8))
        bill = engine_of(model).promise.memory(micro_batches, local)
    options = {"micro_batches": micro_batches, "accumulate_locally": local is True}
    setup = setup_of(shape, plan, precision, 8, **options)
    setup = replace(setup, cluster=Cluster(Device("device"), 8))
    assert rank_peak(setup, 0, states_only=True).total == bill.transient_bytes


# -- beside the device -----------------------------------------------------------------------------------------


WIDE = {"model_type": "terrazzo", **SIZES, "dim": 64, "ffn_dim": 128, "tie_embeddings": True}
OFFLOADED = ("zero3@nvme", "zero3@nvme-all", "zero2@nvme-all", "zero3@cpu:0.5", "shares")


def offloaded(name: str) -> Plan:
    """All in files, but for a part of what the optimizer keeps."""
    if name == "shares":
        return Plan("D@nvme", "D", "D@nvme", "D@nvme:0.5,cpu:0.3")
    return strategy(name)


@pytest.mark.cover(strength=1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OFFLOADED)
def test_files_and_what_goes_through_them_are_as_promised(name: str, precision: str, tmp_path: Path) -> None:
    """Sizes to the byte; what is read and written in a step but for the ends of pages."""
    plan, kind = offloaded(name), PRECISIONS[precision]
    settings = tz.Offload(path=tmp_path, block_mib=0.0625, depth=2).used_under(plan)
    setup = replace(setup_of(model_shape(WIDE), "zero3", kind, 1), plan=plan, offload=settings)
    base = build_model(DecoderConfig(**{key: value for key, value in WIDE.items() if key != "model_type"}))

    def body(rank: int) -> dict[str, float]:
        model, optimizer = tz.shard(base, adamw(base), plan, precision=kind, offload=settings)
        store, moved = engine_of(model).store, {}
        for step in range(3):
            before = store.usage()
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            engine_of(model).settle()
            moved = {key: value - before[key] for key, value in store.usage().items()}
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) == store.usage()["disk_bytes"], step
        usage = store.usage()
        store.close()
        return {**moved, "host_bytes": usage["host_bytes"], "disk_bytes": usage["disk_bytes"]}

    (found,) = on_ranks(1, body)
    memory, traffic = memory_of(setup), traffic_of(setup)
    assert found["host_bytes"] == sum(term.value for term in memory.host if term.name != "update")
    assert found["disk_bytes"] == sum(term.value for term in memory.disk)
    copies = {term.name: term.value for term in traffic.collectives if "disk" in term.name}
    read, written = (sum(sent for what, sent in copies.items() if way in what) for way in ("from disk", "to disk"))
    pages = 4096 * 6 * 9  # at most: six states of a unit, each with its last cell
    assert read <= found["read_bytes"] <= read + 2 * pages
    assert written <= found["written_bytes"] <= written + pages
    assert sum(term.value for term in memory.disk_writes) == pytest.approx(written, abs=pages)


def test_weights_of_frozen_blocks_in_front_are_read_once(tmp_path: Path) -> None:
    base, shape = frozen_in_front({**WIDE, "dim": 128, "ffn_dim": 256, "tie_embeddings": False})
    plan, kind = offloaded("zero3@nvme-all"), PRECISIONS["bf16"]
    settings = tz.Offload(path=tmp_path, block_mib=0.0625, depth=2).used_under(plan)
    setup = replace(setup_of(shape, "zero3", kind, 1), plan=plan, offload=settings)

    def body(rank: int) -> float:
        model, optimizer = tz.shard(base, adamw(base), plan, precision=kind, offload=settings)
        store, before = engine_of(model).store, 0.0
        for _ in range(3):
            before = store.usage()["read_bytes"]
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            engine_of(model).settle()
        read = store.usage()["read_bytes"] - before
        store.close()
        return read

    (read,) = on_ranks(1, body)
    promised = sum(term.value for term in traffic_of(setup).collectives if "from disk" in term.name)
    assert promised <= read <= promised + 4096 * 6 * 9
    assert read < promised + 2 * sum(unit.numel * unit.count for unit in shape.repeated if unit.forward_only)
