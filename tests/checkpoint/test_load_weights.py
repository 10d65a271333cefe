"""Full weights from safetensors into a sharded model that was built without storage."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import terrazzo as tz
from terrazzo import checkpoint
from terrazzo.checkpoint.loading.weights import weights_for
from terrazzo.checkpoint.operations.convert import convert
from terrazzo.train.model.causal_lm import build_model
from tests.helpers.threads import exclusive, run_in_threads

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("tied", [True, False])
def test_a_pretrained_hugging_face_model_is_loaded_shard_by_shard(tmp_path: Path, tied: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    original = transformers.LlamaForCausalLM(config).eval()
    original.save_pretrained(tmp_path)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = original(tokens).logits

    def body(rank: int) -> None:
        with exclusive():
            model = build_model(tmp_path, device="meta")
        model, _ = tz.shard(model, torch.optim.AdamW(model.parameters()), plan="zero3")
        checkpoint.load_weights(model, tmp_path)
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, expected)

    run_in_threads(2, body)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.lm_head.weight = self.embed.weight


@pytest.mark.parametrize("converted", [False, True])
def test_what_is_tied_here_alone_needs_the_same_values_under_all_names(tmp_path: Path, converted: bool) -> None:
    """Of formats that do not know of ties, and of what is converted from them."""
    values = torch.arange(24.0).view(6, 4)
    other = values.clone()
    other[5, 3] += 1  # in the part that the second rank compares
    for name, head in {"alike": values.clone(), "apart": other}.items():
        path = tmp_path / f"{name}.safetensors"
        save_file({"embed.weight": values, "lm_head.weight": head}, path)
        if converted:
            convert(checkpoint.open_source(path), str(tmp_path / name))
    alike, apart = (tmp_path / (name if converted else f"{name}.safetensors") for name in ("alike", "apart"))

    def body(rank: int) -> None:
        with exclusive():
            base = Tied()
        model, _ = tz.shard(base, torch.optim.SGD(base.parameters()), plan="zero3")
        for load in (lambda path: checkpoint.load(path, model, None), partial(checkpoint.load_weights, model)):
            load(alike)
            with pytest.raises(
                tz.BadInput, match=r"embed\.weight and lm_head\.weight are one tensor in the model, and"
            ):
                load(apart)
            with tz.gathered(model) as whole:
                assert torch.equal(whole["embed.weight"], values)

    run_in_threads(2, body)
    plain = Tied()
    with pytest.raises(tz.BadInput, match=r"embed\.weight and lm_head\.weight are one tensor in the model"):
        checkpoint.load_weights(plain, apart)
    checkpoint.load_weights(plain, alike)
    assert torch.equal(plain.lm_head.weight, values)


@pytest.mark.parametrize("name", ["embed.weight", "lm_head.weight"])
def test_a_plain_model_takes_a_tied_weight_under_any_of_its_names(tmp_path: Path, name: str) -> None:
    model, weight = Tied(), torch.arange(24.0).view(6, 4)
    torch.save({name: weight}, tmp_path / "weights.pt")
    checkpoint.load_weights(model, tmp_path / "weights.pt")
    assert torch.equal(model.embed.weight, weight) and model.lm_head.weight is model.embed.weight
    weights = weights_for(model, tmp_path / "weights.pt")
    assert [*weights] == ["embed.weight", "lm_head.weight"] and len(weights) == 2
    torch.save({name: weight, "other": weight + 1}, tmp_path / "more.pt")
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "other"'):
        checkpoint.load_weights(model, tmp_path / "more.pt")
