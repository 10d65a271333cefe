"""What a config.json may hold, and what it may not: any of them comes from anyone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.errors import BadInput
from terrazzo.planner.model.families import FAMILIES
from terrazzo.planner.model.loading import model_shape
from tests.helpers.calls import calls_of
from tests.helpers.examples import examples

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 500,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 100}, r"hidden_size is 100, which does not split evenly over 6 heads \(num_attention_heads\)"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads is 4, which does not divide the 6 query heads"),
        (
            {"num_hidden_layers": 10**18},
            r"num_hidden_layers is 1000000000000000000, but a whole number from 1 to 10,000",
        ),
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0, but a whole number from 1"),
        ({"hidden_size": -96}, r"hidden_size is -96"),
        ({"hidden_size": 96.0}, r"hidden_size is 96.0"),
        ({"hidden_size": "96"}, r"hidden_size is '96'"),
        ({"hidden_size": True}, r"hidden_size is True"),
        ({"hidden_size": [96]}, r"hidden_size is \[96\]"),
        ({"hidden_size": None}, r"hidden_size is missing"),
        ({"vocab_size": 10**30}, r"vocab_size is 10+, but"),
        ({"intermediate_size": {}}, r"intermediate_size is \{\}"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes', but true or false"),
        ({"attention_bias": 3}, r"attention_bias is 3, but true or false"),
        ({"attention_dropout": 1.5}, r"attention_dropout is 1.5, but a probability"),
        ({"attention_dropout": float("nan")}, r"attention_dropout is nan"),
        ({"max_position_embeddings": -1}, r"max_position_embeddings is -1"),
        ({"head_dim": 0}, r"head_dim is 0"),
        ({"hidden_size": "9" * 500}, r"hidden_size is '9+\.\.\., but"),
        (
            {"model_type": "qwen3_moe", **EXPERTS, "num_experts_per_tok": 9},
            r"num_experts_per_tok is 9, more than the 8",
        ),
        ({"model_type": "qwen3_moe", **EXPERTS, "num_experts": 10**9}, r"num_experts is 1000000000, but"),
        ({"model_type": "qwen3_moe", **EXPERTS, "decoder_sparse_step": 0}, r"decoder_sparse_step is 0"),
        ({"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": ["a"]}, r"mlp_only_layers is \['a'\], but a list"),
        ({"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [99]}, r"has layer 99, and layers are 0 to 3"),
        ({"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [-1]}, r"has layer -1, and layers are 0 to 3"),
        ({"model_type": "gemma2", "layer_types": ["slided"] * 4}, r"'slided'; entries are full_attention or sliding"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, r"layer_types is .* one entry for each of the 4"),
        ({"model_type": "deepseek_v2", "n_routed_experts": 8}, r"num_experts_per_tok is missing"),
    ],
)
def test_fields_that_no_model_can_have(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        model_shape(LLAMA | change)


@pytest.mark.parametrize(
    ("rates", "drops"),
    [
        ({}, (True, True)),
        ({"attn_pdrop": 0.0}, (True, False)),
        ({"resid_pdrop": 0.0}, (False, True)),
        ({"attn_pdrop": 0.0, "resid_pdrop": 0}, (False, False)),
    ],
)
def test_a_rate_of_dropout_that_is_given_hides_no_other(rates: dict[str, Any], drops: tuple[bool, bool]) -> None:
    shape = model_shape({"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 2} | rates)
    assert [unit.block and (unit.block.dropout, unit.block.attention_dropout) for unit in shape.repeated] == [drops]


@pytest.mark.parametrize("field", [key for key in LLAMA if key not in ("model_type", "num_key_value_heads")])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(BadInput, match=f"{field} is missing"):
        model_shape({key: value for key, value in LLAMA.items() if key != field})


def test_harmless_fields_are_ignored() -> None:
    noise = {
        "torch_dtype": "bfloat16",
        "rope_scaling": {"factor": 8.0},
        "auto_map": {"AutoConfig": "evil.py"},
        "x": [1],
    }
    assert model_shape(LLAMA | noise) == model_shape(LLAMA)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[1]", "holds a JSON list"),
        (b'"llama"', "holds a JSON str"),
        (b"{}", "model_type is None"),
        (b'{"model_type": 3}', "model_type is 3"),
        (b"[" * 100_000, "nested more than"),
        (b'{"a":' * 100_000, "nested more than"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b" " * (1 << 21), "no file of this kind is more than"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        model_shape(file)


def test_the_ways_to_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    for spec in (folder, str(folder), folder / "config.json", "my-model", "./my-model"):
        assert model_shape(spec).name == "my-model"
    assert model_shape("other.json").name == "other"
    assert model_shape(folder).units == model_shape(LLAMA).units


@pytest.mark.parametrize(
    "spec", ["", "nowhere/model", "nowhere.json", ".", "x\0y/z", "/dev/zero", "~/model", "/" + 5000 * "x"]
)
def test_paths_without_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="no model config at"):
        model_shape(spec)


@pytest.mark.parametrize("spec", ["x" * 5000, "\0", "\x1b[31m", "7B"])
def test_names_of_nothing(spec: str) -> None:
    with pytest.raises(BadInput, match="is neither a preset nor a file here") as caught:
        model_shape(spec)
    assert str(caught.value).isprintable()


def test_a_repository_is_answered_with_a_preset() -> None:
    with pytest.raises(BadInput, match=r"no model config at.*Did you mean 'mistral-7b'.*never downloaded"):
        model_shape("mistralai/Mistral-7B-v0.1")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(BadInput, match="no model config at"):
        model_shape(tmp_path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 200) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = [
    *LLAMA, *EXPERTS, "n_embd", "n_layer", "n_head", "n_inner", "d_model", "n_layers", "n_heads", "ffn_dim", "head_dim",
    "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "first_k_dense_replace",
    "sliding_window", "layer_types", "use_sliding_window", "max_window_layers", "mlp_only_layers", "attention_bias",
    "tie_word_embeddings", "multi_query", "num_kv_heads", "new_decoder_architecture", "attention_dropout",
    "n_positions", "dim", "layers", "heads", "kv_heads", "decoder_sparse_step",
    "max_position_embeddings", "num_local_experts", "rotary_dim", "rotary_pct", "partial_rotary_factor",
    "rope_parameters", "no_rope_layers", "no_rope_layer_interval", "alibi",
]  # fmt: skip


@settings(max_examples=examples(60), deadline=1000)
@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(KEYS[1:]), JSON_VALUES, max_size=4))
def test_any_values_give_a_shape_or_say_why_not(family: str, change: dict[str, Any]) -> None:
    base = LLAMA | {"n_embd": 96, "n_layer": 4, "n_head": 6, "d_model": 96, "n_layers": 4, "n_heads": 6, "ffn_dim": 160}
    base |= {"dim": 96, "layers": 4, "heads": 6, "kv_heads": 2, "max_sequence_length": 64, **EXPERTS}
    try:
        shape = model_shape(base | change | {"model_type": family})
    except BadInput:
        return
    assert shape.numel > 0
    assert 0 < shape.active_numel <= shape.numel
    assert shape.layers > 0


def test_the_largest_accepted_config_takes_few_calls() -> None:
    largest = LLAMA | {"num_hidden_layers": 10_000, "vocab_size": 1 << 28, "model_type": "gemma2"}
    shape = model_shape(largest)
    assert shape.layers == 10_000
    assert len(shape.units) == 3
    assert calls_of(lambda: model_shape(largest)) < 200_000


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("hidden_sise", "hidden_size"), ("num_hidden_layer", "num_hidden_layers"), ("vocab_sizes", "vocab_size")],
)
def test_a_misspelt_field_is_not_passed_over(wrong: str, right: str) -> None:
    values = {key: value for key, value in LLAMA.items() if key != right} | {wrong: 8}
    with pytest.raises(BadInput, match=f"{wrong}.*Did you mean '{right}'"):
        model_shape(values)


OWN = {"dim": 96, "layers": 4, "heads": 6, "kv_heads": 2, "max_sequence_length": 64, "ffn_dim": 160, "vocab_size": 512}


@pytest.mark.parametrize(
    "change", [{"n_experts": 8}, {"experts": {"count": 8, "top_k": 2}}, {"head_dim": 32}, {"mlp_bias": True}], ids=str
)
def test_the_built_in_decoder_has_no_other_keys(change: dict[str, Any]) -> None:
    assert model_shape(OWN | {"dropout": 0.1, "router_balance": "loss", "experts": None}).layers == 4
    with pytest.raises(BadInput, match=f"'{next(iter(change))}' is no key"):
        model_shape(OWN | change)
