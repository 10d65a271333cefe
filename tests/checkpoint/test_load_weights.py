"""Full weights from safetensors into a sharded model that was built without storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import terrazzo as tz
from terrazzo import checkpoint
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
