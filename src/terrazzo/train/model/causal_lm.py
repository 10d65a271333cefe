"""The built-in decoder and models of `transformers` alike: building them, their FLOPs and logits, generating text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.parallel import vocabulary_of
from terrazzo.train.model import huggingface
from terrazzo.train.model.decoder import Decoder, DecoderConfig
from terrazzo.train.model.reward import RewardModel

__all__ = ["build_model", "generate", "logits_of", "num_flops_per_token"]


def build_model(
    spec: DecoderConfig | Mapping[str, Any] | str | Path,
    *,
    device: torch.device | str | None = None,
    dropout: bool = True,
) -> nn.Module:
    """The model that `spec` describes: parameters fp32 and random, on `device` (default: the current default device).

    Args:
        spec: a `DecoderConfig`; or the contents of a `transformers` config.json, or a local folder with one.
        device: `"meta"` gives a model without storage, whose values `tz.shard` draws unit by unit.
        dropout: False builds it as if `spec` dropped nothing in training.

    Raises:
        BadInput: `transformers` is not installed, or the folder or config cannot be used; the message says how.
    """
    target = torch.device(device) if device is not None else torch.get_default_device()
    if isinstance(spec, DecoderConfig):
        with target:
            return Decoder(spec if dropout else replace(spec, dropout=0.0))
    return huggingface.build_causal_lm(spec, target, dropout=dropout)


def num_flops_per_token(model: nn.Module, sequence_length: int) -> int:
    """Training FLOPs per token of a `Decoder`, or estimated of a `transformers` causal LM; 0 when unknown."""
    if isinstance(model, Decoder | RewardModel):
        return model.num_flops_per_token(sequence_length)
    return huggingface.num_flops_per_token(model, sequence_length)


def logits_of(output: Any) -> Tensor:
    """The logits `[B, T, vocab_size]` in what a model returned: a tensor, a tuple, or an output object."""
    if isinstance(output, Tensor):
        return output
    logits: Tensor = output[0] if isinstance(output, tuple) else output.logits
    return logits


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    steps: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continues `tokens`, int64 `[B, T]` with T ≥ 1, by `steps` sampled tokens: int64 `[B, T + steps]`.

    Temperature 0 takes the most likely token. There is no early stop, so under sharding every rank calls
    forward `steps` times; ranks that pass the same tokens and equally seeded CPU generators draw the same
    text. The model's train or eval mode is restored afterwards. Under a prefix mask `tokens` are the prompt.
    """
    context, vocabulary, prompt = _context_length(model), vocabulary_of(model), tokens.shape[1]
    has_prefix = getattr(getattr(model, "config", None), "has_prefix", False)
    was_training = model.training
    model.eval()
    try:
        for _ in range(steps):
            given = tokens[:, -context:] if context else tokens
            prefix = max(0, prompt - tokens.shape[1] + given.shape[1])
            more = {"prefix_lengths": torch.full_like(given, prefix)} if has_prefix else {}
            logits = logits_of(model(given, **more))[:, -1]
            logits = logits if vocabulary is None else vocabulary.whole(logits)
            tokens = torch.cat((tokens, _sample(logits, temperature, generator).to(tokens.device)), dim=1)
    finally:
        model.train(was_training)
    return tokens


def _context_length(model: nn.Module) -> int:
    """The longest sequence the model takes; 0 when it does not say."""
    config = getattr(model, "config", None)
    for name in ("max_sequence_length", "max_position_embeddings", "n_positions"):
        length = getattr(config, name, None)
        if isinstance(length, int):
            return length
    return 0


def _sample(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One token per row of `logits` `[B, vocab_size]`, int64 `[B, 1]` on the CPU, drawn in fp32 there."""
    scores = logits.float().cpu()
    if temperature == 0.0:
        return scores.argmax(dim=-1, keepdim=True)
    return torch.multinomial(F.softmax(scores / temperature, dim=-1), 1, generator=generator)
