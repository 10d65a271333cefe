"""`terrazzo train` whose model gives the loss without logits, beside the same run with all of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import nn

import terrazzo as tz
from terrazzo.config import config_from_dict
from terrazzo.errors import BadInput
from terrazzo.parallel import transformers_support
from terrazzo.train.model import head_loss
from terrazzo.train.model.head_loss import gives_loss, take_targets, wants_loss_without_logits, why_all_logits
from terrazzo.train.model.huggingface import one_sequence_per_row
from terrazzo.train.model.prepare import prepare_model
from terrazzo.train.planning.as_setup import setup_of
from terrazzo.train.preflight import check
from tests.helpers.fake import fake_group
from tests.planner.built import ASKED, answer_here
from tests.train.test_pipeline import EXPERTS, staged, summary_as_alone
from tests.train.test_preferences import llama_config
from tests.train.test_session import config_in, trained

CHUNKED = {"objective": {"loss": "chunked"}}


@pytest.fixture(autouse=True)
def four_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrazzo.nn.chunked_cross_entropy.LEAST_ROWS", 4)
    monkeypatch.setattr("terrazzo.nn.chunked_cross_entropy.LEAST_LOGITS", 1)


@pytest.mark.parametrize(
    ("mesh", "ranks", "plan", "more"),
    [
        pytest.param({}, 2, "zero3", {}, marks=pytest.mark.long),
        pytest.param({"tp": 2}, 4, "zero2", {}, marks=pytest.mark.long),
        pytest.param({"cp": 2, "tp": 2}, 4, "zero3@cpu", {}, marks=pytest.mark.long),
        ({"pp": 2}, 2, "zero3", {"parallel": {"pipeline": {"chunks": 2}}}),  # under tp: test_tensor
        pytest.param(
            {"pp": 2, "tp": 2},
            4,
            "zero1",
            {"parallel": {"pipeline": {"schedule": "zero_bubble"}}},
            marks=pytest.mark.long,
        ),
        pytest.param({"ep": 2}, 2, "zero3", {"model": EXPERTS}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_run_without_logits_trains_as_one_with_them(
    tmp_path: Path, mesh: dict[str, int], ranks: int, plan: str, more: dict[str, Any]
) -> None:
    values = staged(tmp_path, ranks, mesh, plan, **more, **CHUNKED)
    if "pp" not in mesh:
        values["train"]["eval_batches"] = max(1, 2 * mesh.get("tp", 1) * mesh.get("cp", 1) // ranks)
    summary = summary_as_alone(values, ranks, experts="model" in more)
    assert summary["traffic_bytes_promised"] == summary["traffic_bytes_measured"]


@cache
def models() -> dict[str, Path]:
    """Folders of models: one whose logits are its head's output, and one that does something to them."""
    transformers = pytest.importorskip("transformers")
    root = Path(mkdtemp())
    transformers.LlamaForCausalLM(llama_config()).save_pretrained(root / "llama")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    gemma = transformers.Gemma2Config(**small, num_key_value_heads=1, head_dim=8, vocab_size=300)
    transformers.Gemma2ForCausalLM(gemma).save_pretrained(root / "gemma")
    return {"llama": root / "llama", "gemma": root / "gemma"}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("kind", ["decoder", "llama"])
def test_a_model_called_with_targets_gives_the_loss_of_its_logits(kind: str, ties: bool, tmp_path: Path) -> None:
    model = {"tie_embeddings": ties} if kind == "decoder" else {"kind": "huggingface", "path": str(models()[kind])}
    if kind == "llama" and ties:
        pytest.skip("the folder's model is not tied")
    config = config_in(tmp_path, model=model if kind == "decoder" else {**model}, **CHUNKED)
    built = prepare_model(config)
    assert gives_loss(built)
    tokens = torch.randint(60, (2, 9))
    with fake_group(1), torch.no_grad():
        tz.shard(built, None, "zero0")
        logits = built(input_ids=tokens[:, :-1])
        logits = logits if isinstance(logits, torch.Tensor) else logits.logits
        wanted = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        found = built(input_ids=tokens[:, :-1], targets=tokens[:, 1:])
        found = found if isinstance(found, torch.Tensor) else found.logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
}  # fmt: skip
OF_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
OTHER_SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), SMALL | LATENT),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), OF_GPT2),
    "gptj": OF_GPT2 | {"rotary_dim": 4},
}


@pytest.mark.parametrize(
    "model_type",
    [
        "gemma",
        "gemma2",
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in sorted(transformers_support.KNOWN_TYPES - {"gemma", "gemma2"})
        ),
    ],
)
def test_types_whose_logits_are_changed_are_those_that_have_no_loss_without_them(
    model_type: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    sizes = OTHER_SIZES.get(model_type, SMALL)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes}))
    config = config_in(tmp_path, model={"kind": "huggingface", "path": str(tmp_path)}, **CHUNKED)
    if model_type not in transformers_support.CHANGED_LOGITS:
        assert gives_loss(prepare_model(config))
        return
    with pytest.raises(BadInput, match="does not return what one matrix"):
        prepare_model(config)


def test_a_model_that_changes_its_logits_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2 caps them behind its head."""
    monkeypatch.setattr(head_loss, "MANY_LOGITS", 1)
    model = {"kind": "huggingface", "path": str(models()["gemma"])}
    assert not gives_loss(prepare_model(config_in(tmp_path, model=model)))
    with pytest.raises(
        BadInput, match=r"a Gemma2ForCausalLM does not return what one matrix.*objective\.loss to 'auto'"
    ):
        prepare_model(config_in(tmp_path, model=model, **CHUNKED))


@pytest.mark.parametrize(
    ("family", "loss", "more"),
    [
        ("llama", "chunked", {}),
        ("qwen3", "chunked", {"head_dim": 8}),
        ("mixtral", "chunked", {"num_local_experts": 4}),
        ("qwen3_moe", "chunked", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}),
        ("gemma2", "full", {"head_dim": 8}),
        ("cohere", "full", {}),
        ("granite", "full", {}),
        ("phi", "full", {}),
        ("gptj", "full", {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}),
    ],
)
def test_the_planner_reckons_with_the_loss_that_the_run_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, loss: str, more: dict[str, int]
) -> None:
    """Gemma 2 caps its logits, Cohere and Granite scale them, and heads of Phi and GPT-J have a bias."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(head_loss, "MANY_LOGITS", 1)
    monkeypatch.setattr(ASKED, answer_here)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 2, "vocab_size": 64} | more
    transformers.AutoConfig.for_model(family, **small).save_pretrained(tmp_path)
    config = config_in(tmp_path, model={"kind": "huggingface", "path": str(tmp_path)})
    assert setup_of(config, 1).loss == loss
    why = why_all_logits(prepare_model(config))
    assert why is None if loss == "chunked" else "does not return what one matrix without a bias makes" in str(why)


def test_of_blocks_that_are_alike_one_is_run_to_see_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighty take seconds."""
    transformers = pytest.importorskip("transformers")
    mlp, calls = transformers.models.llama.modeling_llama.LlamaMLP, []
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: calls.append(self) or forward(self, x))
    built = prepare_model(config_in(tmp_path, model={"kind": "huggingface", "path": str(models()["llama"])}, **CHUNKED))
    assert gives_loss(built)
    assert len(calls) == 1 < built.config.num_hidden_layers
    with one_sequence_per_row():
        built(input_ids=torch.zeros(1, 2, dtype=torch.int64, device="meta"))
    assert len(calls) == 1 + built.config.num_hidden_layers, "afterwards all run"


def test_a_model_that_cannot_be_run_without_values_is_refused_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise ValueError("the sum is\nnot one")

    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", looks)
    config = config_in(tmp_path, model={"kind": "huggingface", "path": str(models()["llama"])}, **CHUNKED)
    with pytest.raises(BadInput, match=r"cannot be run without values.*\(ValueError: the sum is not one\): set obj"):
        check(config, 1)


def test_a_run_says_why_it_computes_all_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(head_loss, "MANY_LOGITS", 1)
    model = {"kind": "huggingface", "path": str(models()["gemma"])}
    trained(config_in(tmp_path, model=model, batch={"sequence_length": 8}))
    assert "\nloss      of all logits, as a Gemma2ForCausalLM does not return" in capsys.readouterr().out


def test_a_head_with_a_bias_keeps_its_logits(tmp_path: Path) -> None:
    built = prepare_model(config_in(tmp_path))
    built.head = nn.Linear(16, 257, device="meta")
    with pytest.raises(BadInput, match="one matrix without a bias"):
        take_targets(built, config_in(tmp_path, **CHUNKED))


@pytest.mark.parametrize(
    ("more", "message"),
    [({"objective": {"name": "dpo"}}, "'dpo' does not learn from one sum"), ({"precision": {"name": "fp16"}}, "fp16")],
)
def test_what_needs_logits_has_them_and_says_so_before_it_starts(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    assert not wants_loss_without_logits(config_in(tmp_path, **more), 10**9)
    more = {**more, "objective": more.get("objective", {}) | CHUNKED["objective"]}
    with pytest.raises(BadInput, match=rf"objective\.loss is 'chunked', but .*{message}.*'auto' or 'full'"):
        config_in(tmp_path, **more)


def test_many_logits_are_what_a_rank_would_have_of_a_micro_batch(tmp_path: Path) -> None:
    values = {"batch": {"micro_batch": 2, "sequence_length": 4096}}
    assert wants_loss_without_logits(config_in(tmp_path, **values), 2048)
    assert not wants_loss_without_logits(config_in(tmp_path, **values), 2047)
    assert not wants_loss_without_logits(config_in(tmp_path, **values, plan={"mesh": {"tp": 2}}), 2048)
    assert not wants_loss_without_logits(config_in(tmp_path, **values, objective={"loss": "full"}), 10**6)
    assert config_from_dict({"data": {"source": "x"}}).objective.loss == "auto"
