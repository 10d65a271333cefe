"""Models of which not all is trained: adapters, a base in 4 bits, and what is frozen by name."""

from __future__ import annotations

from typing import Any

import pytest

from terrazzo.engine.plan.place import ON_DEVICE
from terrazzo.errors import BadInput
from terrazzo.planner import Estimate, Request, build_setup, estimate
from terrazzo.planner.choice.emit import train_config
from terrazzo.planner.gate.gate import findings
from terrazzo.planner.layout.placement import placement_of
from terrazzo.planner.machine.devices import Device
from terrazzo.planner.memory.peak import memory_of, rank_terms
from terrazzo.planner.memory.step_settings import WORKING, Peak, StepSettings, StepUnit
from terrazzo.planner.memory.unit_events import unit_events
from terrazzo.planner.memory.walk import peak_of
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.model.shapes import TensorShape, UnitShape
from terrazzo.planner.timing.compute import Seconds, block_seconds, flops_per_token

LAYERS, HIDDEN, FFN, KEYS, VOCAB = 80, 8192, 28672, 1024, 128256
"""Of Llama 3 70B."""
LINEAR = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * FFN
"""Elements of a layer's linear layers: 856 million."""
ADAPTER = 2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KEYS) + 3 * (HIDDEN + FFN)
"""Elements of a layer's adapters of rank 1."""


HOST = Device("host", kind="cpu", peak_flops={"bf16": 1e12}, memory_bandwidth=1e11)


def asked(**options: Any) -> Request:
    usual = {"gpus": 4, "memory_bytes": 24e9, "sequence": 1024, "checkpointing": "full"}
    return Request("llama3-70b", **{**usual, **options})


def weights_of(request: Request) -> float:
    return next(term.value for term in memory_of(build_setup(request)).near_terms if term.name == "weights")


def test_a_base_in_4_bits_fits_on_four_cards_of_24_gb_and_one_in_16_does_not() -> None:
    whole = 2 * VOCAB * HIDDEN + HIDDEN + LAYERS * 2 * HIDDEN  # embedding, head and norms
    adapters = LAYERS * 16 * ADAPTER
    packed = LAYERS * LINEAR * 34 // 64
    masters = 4 * adapters  # which serve as their weights, where both are split alike
    assert weights_of(asked(qlora=True)) == pytest.approx((packed + 2 * whole + masters) / 4, rel=1e-4)
    assert memory_of(build_setup(asked(qlora=True))).fits
    assert not memory_of(build_setup(asked(lora=16))).fits


def test_the_inputs_of_activations_make_their_value_where_blocks_run_forward_alone() -> None:
    setup = build_setup(
        asked(sequence=8192, checkpointing="none", memory_bytes=None, freeze="model.embed*,model.layers.?.*")
    )
    terms = {term.name: term for term in rank_terms(setup, 0)[0]}
    inputs = terms["activations"].inputs
    assert inputs["blocks"] == LAYERS - 10
    assert terms["activations"].value == inputs["blocks"] * inputs["saved by one block"]


def test_what_is_frozen_has_no_weight_gradients() -> None:
    plain, lora = (build_setup(asked(lora=rank)) for rank in (None, 16))
    frozen = LAYERS * LINEAR + VOCAB * HIDDEN
    adapters = LAYERS * 16 * ADAPTER
    less = flops_per_token(plain.model, plain.sequence) - flops_per_token(lora.model, lora.sequence)
    assert less == 2 * frozen - 6 * adapters
    assert lora.model.trainable_numel == adapters


def test_what_is_frozen_is_recomputed_all_the_same() -> None:
    options = {"memory_bytes": None, "gpu": "h100-sxm", "sequence": 8192}
    plain, lora = (build_setup(asked(**options, lora=rank)) for rank in (None, 1))
    trained, frozen = (block_seconds(setup, setup.model.repeated[0]) for setup in (plain, lora))
    assert frozen.matmul < 0.75 * trained.matmul
    assert frozen.recompute == pytest.approx(trained.recompute, rel=0.05)
    assert frozen.matmul * frozen.products_share == pytest.approx(trained.matmul / 3, rel=0.08)


def test_blocks_in_front_of_all_that_is_trained_run_forward_alone() -> None:
    """A third of the launches of both passes, though checkpointing repeats others' forward, and codes decoded once."""

    def seconds(precision: str, checkpointing: str, freeze: str) -> Seconds:
        options = {"memory_bytes": None, "gpu": HOST, "precision": precision, "checkpointing": checkpointing}
        setup = build_setup(asked(**options, freeze=freeze))
        return block_seconds(setup, setup.model.repeated[0])

    front, inside = "model.embed*,model.layers.?.*", "model.layers.?.*"  # the embedding's gradient goes back through
    both_ways = seconds("bf16", "none", inside)
    assert seconds("bf16", "full", front) == seconds("bf16", "none", front)
    assert seconds("bf16", "full", front).launch == pytest.approx(both_ways.launch / 3)
    once, twice = (
        seconds("bf16,frozen=nf4", "none", freeze).memory - seconds("bf16", "none", freeze).memory
        for freeze in (front, inside)
    )
    assert 0 < once == pytest.approx(twice / 2)


def test_blocks_that_no_gradient_goes_back_through_hold_nothing_in_backward() -> None:
    """A frozen block in front of a trained one is not gathered ahead while the activations of that one are there."""
    frozen = UnitShape("front", (TensorShape("weight", (4096, 4096), "matrix", trainable=False),))
    trained = UnitShape("back", (TensorShape("weight", (64, 64), "matrix"),))
    root = UnitShape("", (TensorShape("norm", (64,), "vector"),))
    setup = build_setup(asked(memory_bytes=None, precision="bf16"))
    placement = placement_of(setup, ON_DEVICE)

    def peak(forward_only: bool) -> Peak:
        front = StepUnit(unit_events(frozen, placement), working=10.0, forward_only=forward_only)
        back = StepUnit(unit_events(trained, placement), saved=1e9)
        return peak_of([StepUnit(unit_events(root, placement)), front, back], StepSettings())

    gathered = 2 * 4096 * 4096
    assert peak(False).total > 1e9 + gathered > peak(True).total > 1e9
    assert peak(True).parts[WORKING] == 0


def test_tensors_are_frozen_by_name() -> None:
    shape = build_setup(asked(freeze="model.embed_tokens.*, model.layers.1?.mlp.*")).model
    assert shape.numel - shape.trainable_numel == VOCAB * HIDDEN + 10 * 3 * HIDDEN * FFN
    assert shape.layers == LAYERS
    assert sum(unit.count for unit in shape.repeated if not all(t.trainable for t in unit.tensors)) == 10
    every = build_setup(asked(freeze=["*.mlp.*"])).model
    assert len(every.repeated) == 1
    with pytest.raises(BadInput, match=r"'\*\.mpl\.\*' matches no parameter of"):
        build_setup(asked(freeze="*.mpl.*"))
    with pytest.raises(BadInput, match=r"leave nothing of .* to train"):
        build_setup(asked(freeze="*"))
    with pytest.raises(BadInput, match="name a model"):
        build_setup(Request(7e9, gpus=4, lora=4))


def test_what_cannot_be_kept_in_4_bits_is_refused() -> None:
    def rules(request: Request) -> set[str]:
        return {found.rule for found in findings(build_setup(request)) if found.severity == "refuse"}

    assert "no matrix for 4 bits" in rules(Request("gpt2", gpus=1, qlora=True))
    assert "no matrix for 4 bits" not in rules(Request("gpt2", gpus=1, lora=8))
    assert not {name for name in rules(asked(qlora=True, tp=4)) if "4 bits" in name}
    assert "4 bits that fp8 would round again" in rules(asked(qlora=True, precision="fp8", gpu="h100-sxm"))
    narrow = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}
    narrow |= {"num_attention_heads": 2, "vocab_size": 128}
    assert "blocks of 4 bits that ranks along tp cut" in rules(Request(narrow, gpus=2, tp=2, qlora=True))


def test_experts_stay_in_16_bits_and_the_plan_says_so() -> None:
    request = Request("mixtral-8x7b", gpus=8, qlora=True)
    setup = build_setup(request)
    assert "experts beside 4 bits" in {found.rule for found in findings(setup) if found.severity == "warn"}
    experts = 32 * 8 * 3 * 4096 * 14336
    assert experts * 2 / 8 < weights_of(request) < experts * 2.2 / 8
    assert "experts beside 4 bits" not in {found.rule for found in findings(build_setup(asked(qlora=True)))}


def test_a_plan_with_adapters_is_written_for_terrazzo_train() -> None:
    request = asked(qlora=True, lora=8)
    config = train_config(build_setup(request), request.model).config
    assert config["lora"] == {"rank": 8} and config["model"]["weights"] == "pretrained"
    assert config["precision"] == {"name": "bf16", "frozen": "nf4"}
    with pytest.raises(BadInput, match="no parameters by name"):
        train_config(build_setup(asked(freeze="*.mlp.*")), "llama3-70b")


def test_the_base_of_a_preset_is_that_of_its_shape() -> None:
    assert build_setup(asked(lora=1)).model.numel == model_shape("llama3-70b").numel + LAYERS * ADAPTER


def test_blocks_in_front_of_what_is_trained_run_forward_alone() -> None:
    """Of 8 B parameters 16 of 32 blocks, which are 3.5 B: their products are a third, their activations none."""
    half = "model.embed_tokens.*,model.layers.[0-9].*,model.layers.1[0-5].*"
    options: dict[str, Any] = {"gpu": "h100", "strategy": "zero3", "sequence": 2048, "attention": "flash"}
    whole, less, through = (
        estimate(build_setup(Request("llama3-8b", 8, **options, **more)))
        for more in ({}, {"freeze": half}, {"freeze": half.removeprefix("model.embed_tokens.*,")})
    )

    def activations(found: Estimate) -> float:
        return sum(term.value for term in found.memory.near_terms if term.name == "activations")

    assert activations(less) == pytest.approx(activations(whole) / 2)
    assert activations(through) == activations(whole)
    assert whole.time and less.time and through.time
    products = 16 * 218_103_808
    attention = 16 * 12 * 4096 * 2048
    fewer = 4 * products + attention * 2 / 3
    assert whole.time.flops_per_token - less.time.flops_per_token == pytest.approx(fewer)
    assert whole.time.flops_per_token - through.time.flops_per_token == pytest.approx(2 * products)
    assert less.time.step_s < through.time.step_s < whole.time.step_s
