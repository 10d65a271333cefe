"""Shapes of models that exist as modules, and of configs that only transformers can build."""

from __future__ import annotations

import io
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.config import config_from_dict
from terrazzo.engine.partition.unit_choice import find_units
from terrazzo.errors import BadInput
from terrazzo.planner.model import meta
from terrazzo.planner.model.closed_form import shape_of_config
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.model.shapes import ModelShape, Role
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.report.frontier import Frontier
from terrazzo.train.model.attention_pattern import AttentionPattern
from terrazzo.train.model.causal_lm import build_model
from terrazzo.train.model.decoder import DecoderConfig
from terrazzo.train.model.experts import MixtureConfig
from terrazzo.train.planning.as_setup import setup_of
from tests.planner.built import ASKED, answer_here
from tests.planner.test_shapes import CONFIGS, EXPERTS, SMALL, assert_same_units, label, on_meta, tensors_of

DECODER = DecoderConfig(vocab_size=500, dim=96, layers=3, heads=6, kv_heads=2, ffn_dim=160, max_sequence_length=64)
UNTIED = DecoderConfig(**{**vars(DECODER), "tie_embeddings": False})


def roles(shape: ModelShape, unit: int = 0) -> dict[str, Role]:
    return {tensor.name: tensor.role for tensor in shape.units[unit].tensors}


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_a_module_is_read_as_its_config_is(config: dict[str, Any]) -> None:
    """Two ways to the same shape: one through rows, one through the engine's own partition."""
    model = on_meta(config)
    shape, declared = model_shape(model), shape_of_config(config, "test")
    assert_same_units(shape, model)
    assert (shape.tied, shape.vocab, shape.active_numel) == (declared.tied, declared.vocab, declared.active_numel)
    assert shape.matmul_numel == declared.matmul_numel
    assert shape.positions == (declared.positions or None)
    if config.get("new_decoder_architecture"):
        return  # Falcon's config then holds a key, which the model added, for which there are no rows
    assert [unit.block for unit in shape.units] == [unit.block for unit in declared.units]
    for ours, theirs in zip(shape.units, declared.units, strict=True):
        assert set(ours.tensors) == set(theirs.tensors)


def windows_and_norms(shape: ModelShape) -> list[tuple[object, ...]]:
    """Of each kind of block, how far it looks back, and what is normed."""
    blocks = [unit.block for unit in blocks_of(shape)]
    return [(each.window, each.norms, each.query_key_norms, each.result_norms) for each in blocks]


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "qwen3", "olmo2", "olmo3", "llama"])
def test_windows_and_norms_of_modules_are_those_of_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed form's rows beside what modules and their config say where there is none."""
    config = next(each for each in CONFIGS if each["model_type"] == kind) | {"num_hidden_layers": 8}
    config.pop("layer_types", None)
    declared = windows_and_norms(shape_of_config(config, "test"))
    monkeypatch.setattr("terrazzo.planner.model.modules._known_units", lambda _: [])
    assert windows_and_norms(model_shape(on_meta(config))) == declared


def test_every_fourth_layer_of_cohere2_sees_the_whole_sequence() -> None:
    shape = model_shape(on_meta({"model_type": "cohere2", **SMALL, "num_hidden_layers": 8, "sliding_window": 32}))
    assert Counter(unit.block.window for unit in blocks_of(shape)) == {32: 6, None: 2}


def blocks_of(shape: ModelShape) -> list[Any]:
    """One for each layer."""
    return [unit for unit in shape.repeated for _ in range(unit.count)]


@pytest.mark.parametrize("config", [DECODER, UNTIED], ids=["tied", "untied"])
def test_the_built_in_decoder(config: DecoderConfig) -> None:
    model = build_model(config, device="meta")
    shape = model_shape(model)
    assert_same_units(shape, model)
    assert tensors_of(model_shape(vars(config))) == tensors_of(shape)
    assert shape.tied == model_shape(vars(config)).tied == config.tie_embeddings
    assert shape.matmul_numel == config.matmul_numel
    block = shape.repeated[0].block
    assert block is not None
    assert (block.hidden, block.heads, block.kv_heads, block.ffn, block.gated) == (96, 6, 2, 160, True)
    assert (shape.layers, shape.positions, shape.vocab) == (3, 64, 500)


MIXTURE = MixtureConfig(16, 2, 32, shared=1)


@pytest.mark.parametrize(
    "parts",
    [
        {"experts": MIXTURE},
        {"attention": AttentionPattern(window=8)},
        {"attention": AttentionPattern(window=8, stride=4)},
        {"attention": AttentionPattern(window=8, full_every=2)},
        {"attention": AttentionPattern(prefix=True), "dropout": 0.1},
        {"attention": AttentionPattern(window=8, full_every=3), "experts": MIXTURE},
    ],
    ids=["experts", "window", "stride", "full_every", "prefix", "both"],
)
def test_the_built_in_decoders_experts_and_attention(parts: dict[str, Any]) -> None:
    """A module, and the section `model` of a run that builds it, are planned as the same model."""
    config = replace(DECODER, **parts)
    section = {"kind": "decoder", "layers": 3, "heads": 6, "kv_heads": 2, "dim": 96, "ffn_dim": 160, "vocab_size": 500}
    section |= {name: value if name == "dropout" else asdict(value) for name, value in parts.items()}
    run = config_from_dict({"model": section, "batch": {"sequence_length": 64}, "launch": {"device": "cpu"}})
    of_run, of_module = setup_of(run, 1).model, model_shape(build_model(config, device="meta"))
    assert_same_units(of_module, build_model(config, device="meta"))
    assert [unit.block for unit in of_module.units] == [unit.block for unit in of_run.units]
    assert [unit.buffer_bytes for unit in of_module.units] == [unit.buffer_bytes for unit in of_run.units]
    assert tensors_of(of_module) == tensors_of(of_run)
    assert of_module.matmul_numel == of_run.matmul_numel == config.matmul_numel
    assert of_module.experts == (16 if "experts" in parts else 0)


@pytest.mark.parametrize("width", [96, 1200], ids=["small", "large"])
def test_a_decoder_of_one_block_computes_it(width: int) -> None:
    """Nothing repeats in it, but it names the class of its blocks; of the large one every matrix could be a unit."""
    config = replace(DECODER, layers=1, dim=width)
    model = build_model(config, device="meta")
    assert find_units(model, None)[0] == ["blocks.0"]
    shape = model_shape(model)
    section = {
        "kind": "decoder",
        "layers": 1,
        "heads": 6,
        "kv_heads": 2,
        "dim": width,
        "ffn_dim": 160,
        "vocab_size": 500,
    }
    run = config_from_dict({"model": section, "batch": {"sequence_length": 64}, "launch": {"device": "cpu"}})
    assert [unit.block for unit in shape.units] == [unit.block for unit in setup_of(run, 1).model.units]
    assert shape.layers == 1
    assert shape.computes
    assert shape.matmul_numel == config.matmul_numel
    assert tensors_of(shape) == tensors_of(model_shape(config.to_dict()))
    two = model_shape(build_model(replace(config, layers=2), device="meta"))
    assert shape.repeated[0].block == two.repeated[0].block


def test_large_layers_where_nothing_repeats_are_no_blocks() -> None:
    model = nn.Sequential()
    model.first, model.second = nn.Linear(1024, 1024, device="meta"), nn.Linear(1024, 2048, device="meta")
    model.config = SimpleNamespace(hidden_size=1024, num_attention_heads=8)
    assert not model_shape(model).computes


def test_a_model_of_ones_own_is_no_built_in_decoder_by_a_word_in_its_config() -> None:
    model = nn.Linear(8, 8, device="meta")
    model.config = SimpleNamespace(dim=8, n_layers=2, n_heads=2, vocab_size=8)  # type: ignore[assignment]
    assert not model_shape(model).family


def test_frozen_parameters_are_counted_as_such() -> None:
    model = build_model(UNTIED, device="meta")
    frozen = [model.get_submodule("blocks.0"), model.get_submodule("embedding")]
    for module in frozen:
        module.requires_grad_(False)
    shape = model_shape(model)
    assert [unit.count for unit in shape.units] == [1, 1, 2]
    assert shape.numel - shape.trainable_numel == sum(p.numel() for module in frozen for p in module.parameters())


class Classifier(nn.Module):
    """Convolutions and a wide layer; no block repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Linear(1024, 1024)
        self.out = nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def test_a_model_that_is_no_transformer() -> None:
    shape = model_shape(Classifier())
    assert [unit.name for unit in shape.units] == ["", "wide"]
    assert roles(shape)["stem.weight"] == "matrix"
    assert roles(shape)["norm.weight"] == "vector"
    assert (shape.vocab, shape.tied, shape.hidden, shape.repeated[0].block) == (0, False, 0, None)
    assert shape.numel == sum(p.numel() for p in Classifier().parameters())


def test_a_model_in_one_unit() -> None:
    shape = model_shape(nn.Linear(3, 4))
    assert (shape.numel, len(shape.units), shape.root.name) == (16, 1, "")


def test_every_parameter_in_a_block() -> None:
    """The root is there, empty."""
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    shape = model_shape(nn.Sequential(block, nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    assert [(unit.name, unit.count, unit.numel) for unit in shape.units] == [("", 1, 0), ("0", 2, 20)]


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.proj, self.gate = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.attn(x)[..., :8]) + self.experts[int(self.gate(x).sum(0).argmax())](x)


class TinyMixture(nn.Module):
    """Tied head, list of experts, positions: names of nobody's, and a config of common names."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"n_embd": 8, "n_head": 2, "num_experts": 4, "num_experts_per_tok": 1})()
        self.wte, self.wpe = nn.Embedding(50, 8), nn.Embedding(16, 8)
        self.layers = nn.ModuleList(TinyLayer() for _ in range(2))
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.wte.weight


def test_roles_are_guessed_from_types() -> None:
    model = TinyMixture()
    shape = model_shape(model)
    assert shape.tied
    assert shape.vocab == 50
    assert roles(shape) == {"wte.weight": "embedding", "wpe.weight": "vector"}
    found = roles(shape, 1)
    assert (found["gate.weight"], found["attn.weight"], found["attn.bias"]) == ("router", "matrix", "vector")
    assert found["experts.3.weight"] == "expert"
    block = shape.repeated[0].block
    assert block is not None
    assert (block.experts, block.active_experts, block.hidden, block.heads, block.head_dim) == (4, 1, 8, 2, 4)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert shape.numel - shape.active_numel == experts * 3 // 4


def test_a_model_without_parameters() -> None:
    with pytest.raises(BadInput, match="ReLU has no parameters"):
        model_shape(nn.ReLU())


BUILT: list[dict[str, Any]] = [
    {"model_type": "gpt_neo", "hidden_size": 96, "num_layers": 2, "num_heads": 6, "vocab_size": 500,
     "attention_types": [[["global", "local"], 1]]},
    {"model_type": "granitemoe", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "cohere", **SMALL},
    {"model_type": "stablelm", **SMALL, "qk_layernorm": True},
    {"model_type": "phi", **SMALL, "qk_layernorm": True},
    {"model_type": "opt", **SMALL, "ffn_dim": 200, "word_embed_proj_dim": 48},
    {"model_type": "falcon", "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 500,
     "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    {"model_type": "qwen3_next", **SMALL, **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 32},
]  # fmt: skip


@pytest.fixture
def built_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ASKED, answer_here)


@pytest.mark.usefixtures("built_here")
@pytest.mark.parametrize("config", BUILT, ids=label)
def test_other_families_are_built_and_measured(config: dict[str, Any]) -> None:
    shape = model_shape(config | {"pad_token_id": 0})
    assert_same_units(shape, on_meta(config))
    assert all(unit.block is not None and unit.block.hidden == 96 and unit.block.heads == 6 for unit in shape.repeated)
    assert [tensor.role for tensor in shape.root.tensors].count("embedding") == 1


@pytest.mark.long
def test_another_process_builds_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops at its limit of memory, and runs nothing that lies in the folder it is started from.

    GPT-Neo's config, let past the bounds of what may stand in one, becomes a list of a billion names.
    """
    monkeypatch.setattr("terrazzo.planner.model.transformers.MAX_LAYERS", 1 << 40)
    for name in ("json", "torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="gpt_neo: transformers takes more than 2 GiB of memory"):
        model_shape({**BUILT[0], "attention_types": [[["global"] * 1000, 1 << 20]]})


def test_the_other_process_answers_with_the_shape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meta, "_limit_memory", lambda: None)
    config = {"model_type": "granitemoe", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
    values = {key: value for key, value in config.items() if key != "model_type"} | {"pad_token_id": 0}
    request = {"name": "granitemoe", "model_type": "granitemoe", "values": values}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    meta.main()
    said = capsys.readouterr().out
    monkeypatch.setattr("terrazzo.planner.model.transformers._answer", lambda *_: json.loads(said))
    assert model_shape(config) == replace(model_shape(on_meta(config)), name="granitemoe")


def test_a_process_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrazzo.planner.model.transformers.MAX_SECONDS", 0.1)
    with pytest.raises(BadInput, match=r"still building this model after 0.1 s, and was stopped\. Lower its"):
        model_shape({"model_type": "cohere", **SMALL})


def test_a_process_that_dies_says_nothing_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BadInput, match=r"ended with exit code 1\. Correct"):
        model_shape({"model_type": "cohere", **SMALL})


def test_the_last_word_of_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ["sh", "-c", "echo one >&2; echo 'ImportError: no torch' >&2; exit 3"]
    monkeypatch.setattr("terrazzo.planner.model.transformers.tethered", lambda *_, **__: program)
    with pytest.raises(BadInput, match=r"exit code 3 \(ImportError: no torch\)\. Correct"):
        model_shape({"model_type": "cohere", **SMALL})


def test_code_of_a_model_is_never_run(tmp_path: Any) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    config = {"model_type": "cohere", **SMALL, "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    with pytest.raises(BadInput, match="'auto_map': it asks to run Python code"):
        model_shape(config)
    with pytest.raises(BadInput, match="'auto_map'"):
        model_shape({"model_type": "llama4", "text_config": config})


@pytest.mark.usefixtures("built_here")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "cohere", **SMALL, "num_hidden_layers": 10**18},
            "num_hidden_layers is 1,000,000,000,000,000,000",
        ),
        ({"model_type": "cohere", **SMALL, "hidden_size": 10**9}, "hidden_size is 1,000,000,000"),
        ({"model_type": "cohere", **SMALL, "hidden_size": -5}, "transformers cannot build a 'cohere'"),
        ({"model_type": "cohere", **SMALL, "hidden_size": "x"}, "transformers cannot build a 'cohere'"),
        ({"model_type": "cohere", **SMALL, "layer_types": [0] * 20_000}, "layer_types holds 20,000 entries"),
        ({**BUILT[0], "attention_types": [[["global"] * 1000, 1 << 20]]}, "repeats 1,000 entries 1,048,576 times"),
        ({**BUILT[0], "attention_types": [[["global", "local"], 501]]}, "repeats 2 entries 501 times"),
        ({"model_type": "cohere", **SMALL, "extra": {1}}, "holds what no config.json can"),
        ({"model_type": "gemma3n", "use_pretrained_backbone": True}, "use_pretrained_backbone asks for a download"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "coher"}, "Did you mean 'cohere'"),
        ({"model_type": None}, "model_type is None"),
    ],
)
def test_configs_that_cannot_be_built(config: Mapping[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        model_shape(config)


@pytest.mark.usefixtures("built_here")
def test_a_model_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta, "MAX_REGISTRATIONS", 2_000)
    start = time.process_time()
    with pytest.raises(BadInput, match="more than 2,000 modules and parameters"):
        model_shape({"model_type": "cohere", **SMALL, "num_hidden_layers": 900})
    assert time.process_time() - start < 20
    with torch.device("meta"):
        assert len(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3_000)))) == 3_000  # the bound is lifted again


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert model_shape("qwen3-8b").layers == 36
    with pytest.raises(BadInput, match=r"'cohere' is not among.*pip install -e '\.\[hf\]'.*llama, mistral"):
        model_shape({"model_type": "cohere", **SMALL})


def test_a_module_that_cannot_be_read_is_not_said_to_fit_without_a_word() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    found = tz.plan(model, gpus=2, gpu="h100-sxm", strategy="zero3", sequence=128)
    assert isinstance(found, Estimate)
    assert any("activations and logits are not counted" in warning for warning in found.notes)
    searched = tz.plan(model, gpus=2, gpu="h100-sxm", sequence=128)
    assert isinstance(searched, Frontier)
    assert searched.best
    assert any("activations and logits are not counted" in warning for warning in searched.best.notes)
