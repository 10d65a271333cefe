"""Documents in one sequence that do not see each other, against the same documents alone in plain PyTorch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.config import config_from_dict, load_config
from terrazzo.errors import BadInput
from terrazzo.parallel import transformers_support
from terrazzo.parallel.transformers_support import DOCUMENTS_APART
from terrazzo.train.data import IGNORED, TokenData, load_data
from terrazzo.train.model.causal_lm import build_model, logits_of
from terrazzo.train.model.decoder import DecoderConfig
from terrazzo.train.model.objectives import objective_of
from terrazzo.train.preflight import check
from tests.helpers.chat import conversations, write_records
from tests.train.test_preferences import lines, train

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TEXTS = ["a first text, which is longer than the others are", "b", "and a third", "the fourth one ends", "five"]


def data_of(folder: Path, records: list[Any], length: int, **data: Any) -> TokenData:
    source = write_records(folder / "records.jsonl", records)
    settings = {"source": str(source), "cache": str(folder), "validation_fraction": 0, "attention": "document"}
    return load_data(config_from_dict({"data": settings | data, "batch": {"sequence_length": length}}))


def loss_alone(model: nn.Module, tokens: Tensor, learnt: Tensor) -> Tensor:
    """Summed over the tokens to learn of one document, as a sequence of its own."""
    logits = logits_of(model(tokens[None, :-1]))[0]
    return (F.cross_entropy(logits, tokens[1:], reduction="none") * learnt[1:]).sum()


def random_decoder(length: int) -> nn.Module:
    torch.manual_seed(0)
    config = DecoderConfig(257, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=24, max_sequence_length=length)
    model = build_model(config, device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def packed_loss(model: nn.Module, data: TokenData) -> tuple[Tensor, int]:
    batch = data.train.batch(torch.arange(len(data.train)).numpy())
    objective = objective_of(config_from_dict({}))
    return objective.loss_of(model, model(**objective.inputs(model, batch, CPU)), batch), batch.valid_tokens


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_packed_texts_have_the_loss_and_gradient_of_the_texts_alone(tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"text": text} for text in TEXTS], 60, packing="whole")
    assert len(data.train) == 2  # of five texts
    model = random_decoder(60)
    documents = [torch.tensor([*text.encode(), 256]) for text in TEXTS]
    alone = torch.stack([loss_alone(model, tokens, torch.ones(len(tokens))) for tokens in documents]).sum()
    found, count = packed_loss(model, data)
    assert count == sum(len(tokens) - 1 for tokens in documents)
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=0)
    for ours, theirs in zip(gradients(model, found), gradients(model, alone), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    sequence = config_from_dict({}).data.attention
    across = load_data(
        config_from_dict(
            {
                "data": {"source": str(tmp_path / "records.jsonl"), "cache": str(tmp_path), "validation_fraction": 0}
                | {"packing": "whole", "attention": sequence},
                "batch": {"sequence_length": 60},
            }
        )
    )
    assert across.train.fingerprint != data.train.fingerprint
    assert abs(packed_loss(model, across)[0] - alone) > 0.1


def test_a_stream_is_cut_into_pieces_of_documents(tmp_path: Path) -> None:
    """Of a text that a sequence cuts, the rest is a piece that begins there; a sequence's last target may be in it."""
    length = 16
    data = data_of(tmp_path, [{"text": text} for text in TEXTS], length)
    model = random_decoder(length)
    stream = [(byte, number) for number, text in enumerate(TEXTS) for byte in [*text.encode(), 256]]
    alone, count = torch.zeros(()), 0
    for start in range(0, len(stream) - 1, length):
        window = stream[start : start + length + 1]
        for number in {number for _, number in window}:
            tokens = torch.tensor([byte for byte, one in window if one == number])
            if len(tokens) > 1:
                alone, count = alone + loss_alone(model, tokens, torch.ones(len(tokens))), count + len(tokens) - 1
    found, valid = packed_loss(model, data)
    assert valid == count == data.train.targets_numel
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=0)


def test_packed_conversations_keep_their_masks(tmp_path: Path) -> None:
    records = conversations(6)
    data = data_of(tmp_path, records, 400, packing="whole")
    single = data_of(tmp_path, records, 400, packing="single", attention="sequence")
    model = random_decoder(400)
    (packed, count), (alone, same) = packed_loss(model, data), packed_loss(model, single)
    assert len(data.train) < len(single.train)
    assert count == same
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0)


def test_positions_begin_anew_also_in_what_fills_a_sequence(tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"text": "abc"}, {"text": "d"}], 10, packing="whole")
    batch = data.train.batch(torch.tensor([0, -1]).numpy())
    assert batch.positions is not None
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3], list(range(10))]
    assert (batch.targets[0] != IGNORED).tolist() == [True] * 3 + [False, True] + [False] * 5


SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gptj": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "rotary_dim": 4},
    "mixtral": {"num_local_experts": 2},
    "qwen2_moe": {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "bloom": {"n_layer": 2, "n_head": 2},
}


def difference(model_type: str) -> float:
    """Of the logits of two documents in one sequence from those of each alone, at most."""
    transformers = pytest.importorskip("transformers")
    sizes = SIZES if model_type not in ("gpt2", "gptj") else {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    kept = {key: value for key, value in sizes.items() if model_type != "gpt_neox" or key not in UNKNOWN_TO_NEOX}
    config = transformers.AutoConfig.for_model(model_type, **kept, **OTHERS.get(model_type, {}))
    config.use_cache = False
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(1, 64, (2, 12))
    positions = torch.cat((torch.arange(5), torch.arange(7))).expand(2, -1)
    with torch.no_grad():
        packed = model(tokens, position_ids=positions).logits
        alone = torch.cat((model(tokens[:, :5]).logits, model(tokens[:, 5:]).logits), dim=1)
    return float((packed - alone).abs().max())


UNKNOWN_TO_NEOX = ("head_dim", "num_key_value_heads")


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_models_of_transformers_cut_attention_where_positions_begin_anew(model_type: str) -> None:
    assert difference(model_type) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("model_type", sorted(DOCUMENTS_APART))
def test_every_type_of_model_that_is_taken_cuts_attention(model_type: str) -> None:
    assert difference(model_type) < 1e-5


def test_what_is_said_of_types_of_models_is_of_the_versions_that_are_pinned() -> None:
    """Who pins others runs the long tests here, and then says so."""
    pinned = dict(re.findall(r"^(transformers|torch)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    told = "last with transformers {transformers} and torch {torch}".format(**pinned)
    assert told in Path(transformers_support.__file__).read_text(encoding="utf-8")
    assert told in (ROOT / "docs" / "guides" / "sft.md").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["opt", "bloom"])
def test_types_that_do_not_are_not_taken(model_type: str) -> None:
    assert model_type not in DOCUMENTS_APART
    assert difference(model_type) > 1e-2


def test_a_model_that_may_look_further_back_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"} | SIZES))
    (tmp_path / "text.txt").write_text("some text")
    values: dict[str, Any] = {
        "model": {"kind": "huggingface", "path": str(tmp_path)},
        "data": {"source": str(tmp_path / "text.txt"), "attention": "document"},
        "log": {"folder": str(tmp_path / "run")},
    }
    with pytest.raises(
        BadInput, match=r"model_type 'opt' is not known to cut attention.*llama.*Leave data.attention out"
    ):
        check(config_from_dict(values), 1)
    for alone in ({"data": values["data"] | {"packing": "single"}}, {"objective": "dpo"}):  # nothing is cut
        assert not any("mask of data.attention" in note for note in check(config_from_dict(values | alone), 1))


def test_one_document_per_sequence_needs_no_cut(tmp_path: Path) -> None:
    data = data_of(tmp_path, conversations(4), 400)
    assert "data.attention 'document' does nothing" in data.notes[-1]
    assert data.train.batch(torch.arange(1).numpy()).positions is None


def test_the_example_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = [f"log.folder={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}", "launch.ignore_planner=true"]
    settings += ["train.steps=1", "schedule.warmup_steps=0", "model.layers=1", "train.eval_every=null"]
    config = load_config("examples/packing.yaml", settings)
    assert any("mask of data.attention" in note for note in check(config, 2))
    train(config.model_dump(mode="json"))
    (summary,) = lines(tmp_path / "run", "summary")
    assert summary["traffic_bytes_measured"] == summary["traffic_bytes_promised"]
    assert summary["peak_memory_bytes_promised"] is not None
