"""Shapes in closed form against transformers' own models on the meta device, and against published totals."""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from terrazzo.engine.partition.unit_choice import find_units
from terrazzo.engine.partition.unit_members import partition
from terrazzo.errors import BadInput
from terrazzo.planner.model.closed_form import shape_of_config
from terrazzo.planner.model.families import FAMILIES
from terrazzo.planner.model.loading import model_shape
from terrazzo.planner.model.presets import PRESETS
from terrazzo.planner.model.shapes import ModelShape
from tests.helpers.calls import calls_of

transformers = pytest.importorskip("transformers")

TensorsOfUnit = tuple[tuple[str, tuple[int, ...]], ...]

SMALL: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 500,
    "max_position_embeddings": 64,
}
PLAIN = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
GPT2 = {"n_embd": 96, "n_layer": 2, "n_head": 6, "vocab_size": 500, "n_positions": 64}
LATENT = PLAIN | {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    **EXPERTS,
}
FALCON = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 500}

CONFIGS: list[dict[str, Any]] = [
    *(
        {"model_type": name, **SMALL}
        for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
    ),
    *({"model_type": name, **SMALL} for name in ("olmo", "olmo2", "olmo3", "granite", "smollm3", "stablelm", "phi3")),
    *({"model_type": name, **SMALL} for name in ("glm4", "starcoder2", "phi")),
    *({"model_type": name, **PLAIN} for name in ("llama", "phi3", "olmo2", "gpt_neox", "phi")),
    *(
        {"model_type": name, **SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 24}
        for name in ("llama", "qwen3", "gemma", "gemma2", "olmo", "granite", "smollm3", "mistral", "qwen2", "glm4")
    ),
    {"model_type": "glm4", **SMALL, "attention_bias": False},
    {"model_type": "gpt_neox", **PLAIN, "attention_bias": False},
    {"model_type": "starcoder2", **SMALL, "use_bias": False},
    {"model_type": "stablelm", **SMALL, "use_qkv_bias": True},
    {"model_type": "gpt2", **GPT2},
    {"model_type": "gpt2", **GPT2, "n_inner": 200},
    {"model_type": "gpt2", "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 500},
    {"model_type": "gptj", **GPT2, "rotary_dim": 8},
    {"model_type": "gpt_bigcode", **GPT2},
    {"model_type": "gpt_bigcode", **GPT2, "multi_query": False},
    {"model_type": "opt", **PLAIN, "ffn_dim": 200, "word_embed_proj_dim": 96},
    {"model_type": "opt", **PLAIN, "ffn_dim": 200, "enable_bias": False},
    {"model_type": "xglm", "d_model": 96, "num_layers": 3, "attention_heads": 6, "vocab_size": 500, "ffn_dim": 200},
    {"model_type": "bloom", "hidden_size": 96, "n_layer": 3, "n_head": 6, "vocab_size": 500},
    {"model_type": "bloom", "n_embed": 96, "n_layer": 3, "num_attention_heads": 6, "vocab_size": 500},
    {"model_type": "mpt", "d_model": 96, "n_layers": 3, "n_heads": 6, "vocab_size": 500, "expansion_ratio": 4},
    {"model_type": "falcon", **FALCON},
    {"model_type": "falcon", **FALCON, "bias": True, "multi_query": False, "ffn_hidden_size": 100},
    {"model_type": "falcon", **FALCON, "parallel_attn": False, "alibi": True},
    {"model_type": "falcon", **FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "olmoe", **SMALL, "num_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "gpt_oss", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "qwen2_moe", **SMALL, **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 40},
    {"model_type": "qwen2_moe", **SMALL, **EXPERTS, "num_experts": 8, "decoder_sparse_step": 2, "qkv_bias": False},
    {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "num_experts": 8, "head_dim": 20},
    {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "num_local_experts": 8, "mlp_only_layers": [0, 2]},
    {"model_type": "deepseek_v2", **LATENT, "first_k_dense_replace": 1, "q_lora_rank": None, "topk_method": "greedy"},
    {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": 32, "attention_bias": True, "mlp_bias": True},
    {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": 32, "first_k_dense_replace": 2},
    {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": None, "first_k_dense_replace": 0, "attention_bias": True},
]


def label(config: dict[str, Any]) -> str:
    extra = [f"{key}={value}" for key, value in config.items() if key not in {**SMALL, **GPT2, **LATENT, **FALCON}]
    return ",".join([config["model_type"], *extra[1:]])


def on_meta(config: dict[str, Any]) -> nn.Module:
    """The model that transformers makes of a config. Several tests look at the same one; none may change it."""
    return _on_meta(json.dumps(config))


@functools.cache
def _on_meta(text: str) -> nn.Module:
    config = json.loads(text)
    with torch.device("meta"):
        kept = {key: value for key, value in config.items() if key != "model_type"}
        built = transformers.AutoConfig.for_model(config["model_type"], pad_token_id=0, **kept)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(built)
    return model


def units_of_engine(model: nn.Module) -> dict[str, TensorsOfUnit]:
    """What the engine would make a unit of, by unit name: the names and shapes of its parameters in order."""
    units = {}
    for spec in partition(model, find_units(model, None)[0]):
        start = len(spec.name) + 1 if spec.name else 0
        units[spec.name] = tuple((m.name[start:], tuple(m.parameter.shape)) for m in spec.members)
    return units


def tensors_of(shape: ModelShape) -> list[tuple[int, TensorsOfUnit]]:
    return [(unit.count, tuple((t.name, t.shape) for t in unit.tensors)) for unit in shape.units]


def assert_same_units(shape: ModelShape, model: nn.Module) -> None:
    units = units_of_engine(model)
    found = {name: tensors for name, tensors in units.items() if name}
    assert tensors_of(shape)[0] == (1, units[""])
    runs = [(tensors, len(list(run))) for tensors, run in itertools.groupby(found.values())]
    ours = [
        (tensors, sum(count for count, _ in run))
        for tensors, run in itertools.groupby(tensors_of(shape)[1:], key=lambda pair: pair[1])
    ]
    assert ours == runs
    assert {unit.name for unit in shape.repeated} <= set(found)
    assert shape.numel == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_every_tensor_is_that_of_transformers(config: dict[str, Any]) -> None:
    assert_same_units(shape_of_config(config, "test"), on_meta(config))


ONE_OF_EACH = {config["model_type"]: config for config in reversed(CONFIGS)}


@pytest.mark.parametrize("config", ONE_OF_EACH.values(), ids=label)
def test_the_head_is_tied_as_the_config_says(config: dict[str, Any]) -> None:
    """The other way than its class assumes: that way is in the test before."""
    tied = not shape_of_config(config, "test").tied
    shape = shape_of_config(config | {"tie_word_embeddings": tied}, "test")
    assert shape.tied == tied
    assert_same_units(shape, on_meta(config | {"tie_word_embeddings": tied}))


def test_every_family_is_among_the_tested() -> None:
    assert {config["model_type"] for config in CONFIGS} == set(FAMILIES) - {"terrazzo"}


WINDOWED: list[dict[str, Any]] = [
    *({"model_type": name, **SMALL, "num_hidden_layers": 9} for name in ("gemma2", "gemma3_text", "olmo3")),
    {"model_type": "gpt_oss", **SMALL, "num_hidden_layers": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "gemma3_text", **SMALL, "sliding_window_pattern": 2, "sliding_window": 16},
    {"model_type": "qwen2", **SMALL, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    {"model_type": "qwen3", **SMALL, "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1},
    {"model_type": "qwen3", **SMALL, "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 9},
    {"model_type": "olmo3", **SMALL, "layer_types": ["full_attention"] + 2 * ["sliding_attention"]},
]


@pytest.mark.parametrize("config", WINDOWED, ids=label)
def test_windows_are_those_of_transformers(config: dict[str, Any]) -> None:
    kept = {key: value for key, value in config.items() if key != "model_type"}
    built = transformers.AutoConfig.for_model(config["model_type"], pad_token_id=0, **kept)
    near = built.layer_types.count("sliding_attention")
    shape = shape_of_config(config, "test")
    counts = {unit.block.window: unit.count for unit in shape.repeated if unit.block}
    assert counts == {
        width: count for width, count in ((built.sliding_window, near), (None, shape.layers - near)) if count
    }


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)]
)
def test_a_window_over_all_layers(given: dict[str, Any], expected: int | None) -> None:
    (unit,) = shape_of_config({"model_type": "mistral", **SMALL, **given}, "test").repeated
    assert unit.block is not None
    assert unit.block.window == expected


OUTPUTS = (".o_proj", "attn.out_proj", "attn.c_proj", "attention.dense", "self_attn.dense")


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_blocks_compute_what_their_modules_hold(config: dict[str, Any]) -> None:
    """Norms by the channels that they see, and the width of attention, measured on the modules themselves."""
    shape = shape_of_config(config, "test")
    model = on_meta(config)
    for unit in shape.repeated:
        block = unit.block
        assert block is not None
        inside = dict(model.get_submodule(unit.name).named_modules())
        norms = {name: module for name, module in inside.items() if "Norm" in type(module).__name__}
        heads = [name for name in norms if name.endswith((".q_norm", ".k_norm"))]
        widths = [inside[name.replace("norm", "proj")].out_features for name in heads]
        wide = [name for name in norms if name not in heads and "_a_layernorm" not in name]
        assert block.norms == len(wide)
        assert sum(widths) == block.query_key_norms * block.query_key_channels(tp=1)
        after = ("post_feedforward_layernorm", "post_mlp_layernorm")
        assert block.result_norms == any(name.endswith(after) for name in wide)
        assert (block.norm == "rms") == all("RMS" in type(norms[name]).__name__ for name in wide)
        out = next(module for name, module in inside.items() if name.endswith(OUTPUTS))
        assert block.heads * block.value_dim == getattr(out, "in_features", out.weight.shape[0])


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_heads_rotate_by_as_many_channels_as_their_tables_have(config: dict[str, Any]) -> None:
    """Two channels for each frequency of the rotary embedding that transformers makes; GPT-J's table has them all."""
    model, shape = on_meta(config), shape_of_config(config, "test")
    tables = {name.rpartition(".")[2]: buffer for name, buffer in model.named_buffers()}
    turned = {2 * buffer.numel() for name, buffer in tables.items() if name.endswith("inv_freq")}
    turned |= {tables["embed_positions"].shape[1]} if config["model_type"] == "gptj" else set()
    found = {unit.block.rotated for unit in shape.repeated if unit.block}
    assert found == ({0} if config.get("alibi") else turned or {0})


@pytest.mark.parametrize(
    ("preset", "changes", "turned"),
    [
        ("gpt-neox-20b", {}, 24),  # rotary_pct 0.25 of 96
        ("gpt-neox-20b", {"rotary_pct": 1}, 96),
        ("pythia-1.4b", {"rope_parameters": {"partial_rotary_factor": 0.5}}, 64),
        ("gpt-j-6b", {}, 64),  # rotary_dim, of 256
        ("gpt-j-6b", {"rotary_dim": None}, 256),
        ("phi-2", {}, 32),  # partial_rotary_factor 0.4 of 80
        ("starcoder2-15b", {}, 128),
        ("falcon-7b", {}, 64),
        ("falcon-7b", {"alibi": True}, 0),
        ("gpt3-175b", {}, 0),
    ],
)
def test_heads_of_published_models_rotate(preset: str, changes: dict[str, Any], turned: int) -> None:
    (unit,) = shape_of_config({**PRESETS[preset], **changes}, preset).repeated
    assert unit.block is not None
    assert unit.block.rotated == turned


@pytest.mark.parametrize(("rotating", "turned"), [(None, 27), ([1] * 18 + [0] * 18, 18)])
def test_layers_without_a_rotary_embedding(rotating: list[int] | None, turned: int) -> None:
    """SmolLM3 3B: every fourth of 36 layers has none (no_rope_layers of its config)."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 11008}
    config = {"model_type": "smollm3", **sizes, "num_hidden_layers": 36, "vocab_size": 128256}
    shape = shape_of_config({**config, "no_rope_layers": rotating}, "smollm3")
    by_channels = {unit.block.rotated: unit.count for unit in shape.repeated if unit.block}
    assert by_channels == {128: turned, 0: 36 - turned}
    with pytest.raises(BadInput, match=r"no_rope_layers is .* one entry for each of the 36"):
        shape_of_config({**config, "no_rope_layers": [1, 0]}, "smollm3")


@pytest.mark.parametrize("share", [0, 1.5, True, "half"])
def test_a_share_of_a_head_that_cannot_rotate(share: object) -> None:
    with pytest.raises(BadInput, match=r"partial_rotary_factor is .* a share above 0 and up to 1"):
        shape_of_config({**PRESETS["phi-2"], "partial_rotary_factor": share}, "phi")


PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2b": 2_506_172_416,
    "gemma2-9b": 9_241_705_984,
    "gpt2-xl": 1_557_611_200,
    "gpt2-1.5b": 1_557_611_200,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "phi-2": 2_779_683_840,
    "phi3-mini": 3_821_079_552,
    "bloom-176b": 176_247_271_424,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
}
"""Parameters, each once, as model cards and checkpoints' own listings give them; of DeepSeek-V3 without the extra
module that predicts a second token."""


@pytest.mark.parametrize(("name", "numel"), PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(name: str, numel: int) -> None:
    assert model_shape(name).numel == numel


@pytest.mark.parametrize(
    ("name", "billions"),
    # The reports round to 13, 3, 22 and 37 (arXiv 2401.04088, 2505.09388, 2412.19437).
    [("mixtral-8x7b", 12.88), ("qwen3-30b-a3b", 3.353), ("qwen3-235b-a22b", 22.19), ("deepseek-v3", 37.55)],
)
def test_active_parameters_are_those_of_the_reports(name: str, billions: float) -> None:
    assert model_shape(name).active_numel / 1e9 == pytest.approx(billions, abs=0.005)


DEPTH = ("num_hidden_layers", "n_layer", "n_layers")


def first_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same model with the fewest layers that have one of each kind."""
    depth = next(key for key in DEPTH if key in config)
    return {**config, depth: config.get("first_k_dense_replace", 0) + 2}


DIFFERENT = {json.dumps(first_layers(config), sort_keys=True): name for name, config in PRESETS.items()}


@pytest.mark.parametrize("name", DIFFERENT.values())
def test_presets_are_what_transformers_builds(name: str) -> None:
    """Their first layers: how many there are of them is in the numbers that were published."""
    config = first_layers(PRESETS[name])
    assert_same_units(shape_of_config(config, name), on_meta(config))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_as_large_as_they_are_called(name: str) -> None:
    """7B means between 5 and 9."""
    shape = model_shape(name)
    assert shape.name == name
    size = next((part for part in reversed(name.split("-")) if part[-1] in "mb" and part[:1].isdigit()), None)
    if size and "x" not in size:
        said = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
        assert shape.numel == pytest.approx(said, rel=0.35)


@pytest.mark.parametrize("text", ["llama3-8b", "LLAMA3_8B", "Llama 3 8B", "llama-3-8b", "llama3-8B"])
def test_spelling_of_a_preset(text: str) -> None:
    assert model_shape(text) == model_shape("llama3-8b")


@pytest.mark.parametrize(
    ("name", "makes_keys"),
    [
        ("llama3-8b", {"self_attn.k_proj.weight", "self_attn.v_proj.weight"}),
        ("qwen2.5-7b", {f"self_attn.{each}_proj.{leaf}" for each in "kv" for leaf in ("weight", "bias")}),
        ("gpt2", set()),
    ],
)
def test_rows_say_what_makes_keys_alone(name: str, makes_keys: set[str]) -> None:
    tensors = [tensor for unit in model_shape(name).units for tensor in unit.tensors]
    assert {tensor.name for tensor in tensors if tensor.of_key_heads} == makes_keys


def test_unknown_name_says_what_is_accepted() -> None:
    words = r"'lama3-8b' is neither.*Did you mean 'llama3-8b'\?.*config.json.* lists all [0-9]+ presets\.$"
    with pytest.raises(BadInput, match=words):
        model_shape("lama3-8b")


@pytest.mark.parametrize("text", ["70e9", "70B", "8,000,000"])
def test_a_number_of_parameters_is_no_name(text: str) -> None:
    with pytest.raises(
        BadInput, match=rf"Did you mean a preset such as [\w.-]+, or --params {text} \(in Python, a number\)\?$"
    ):
        model_shape(text)


def test_a_preset_takes_few_calls() -> None:
    for name, config in PRESETS.items():
        shape_of_config(config, name)
        assert calls_of(partial(shape_of_config, config, name)) < 5000


@pytest.mark.long
def test_no_framework_is_imported_for_a_closed_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[0]))
    program = (
        "import sys\nfrom terrazzo.planner.model.loading import model_shape\n"
        f"model_shape('llama3-8b'), model_shape({str(tmp_path)!r}), model_shape(7e9)\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("count", [70e9, 70_000_000_000])
def test_a_bare_number_of_parameters(count: float) -> None:
    shape = model_shape(count)
    assert (shape.numel, shape.layers, shape.vocab, shape.bare) == (70_000_000_000, 0, 0, True)
    assert shape.name == "70B parameters"


@pytest.mark.parametrize("count", [0, -1, 0.5, float("nan"), float("inf"), 10**16, 10**400])
def test_an_impossible_number_of_parameters(count: float) -> None:
    with pytest.raises(BadInput, match="number of parameters"):
        model_shape(count)


@pytest.mark.parametrize("spec", [None, True, [1], b"llama3-8b", 1j])
def test_what_is_no_description_of_a_model(spec: Any) -> None:
    with pytest.raises(BadInput, match=r"Give a preset, or the path.* a torch module, or a number of parameters"):
        model_shape(spec)
