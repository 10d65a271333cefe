"""Builds the model of a run from its configuration, ready to be sharded."""

from __future__ import annotations

import copy
from functools import cached_property

from torch import nn

from terrazzo.config import Config
from terrazzo.engine import checkpoint_activations, compile_units
from terrazzo.train.data.tokenizer import Tokenizer, load_tokenizer
from terrazzo.train.model.attention_pattern import AttentionPattern
from terrazzo.train.model.decoder import DecoderConfig
from terrazzo.train.model.experts import MixtureConfig
from terrazzo.train.model.head_loss import take_targets
from terrazzo.train.model.linears import convert_linears
from terrazzo.train.model.objectives import objective_of

__all__ = ["ModelOnPaper", "decoder_config", "prepare_model"]


def decoder_config(config: Config, tokenizer: Tokenizer | None = None) -> DecoderConfig:
    """The built-in decoder's shape, with the defaults that depend on other settings filled in.

    Args:
        tokenizer: of the data; loaded where it is needed and not given.
    """
    model, data = config.model, config.data
    vocab_size = model.vocab_size or (tokenizer or load_tokenizer(data.tokenizer, data.end_of_document)).vocab_size
    ffn_dim = model.ffn_dim or -(-8 * model.dim // 3 // 64) * 64
    return DecoderConfig(
        vocab_size=vocab_size,
        dim=model.dim,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        ffn_dim=ffn_dim,
        max_sequence_length=config.batch.sequence_length,
        rope_theta=model.rope_theta,
        tie_embeddings=model.tie_embeddings,
        dropout=model.dropout,
        experts=_experts_config(config, ffn_dim),
        attention=_attention_pattern(config),
    )


def _experts_config(config: Config, ffn_dim: int) -> MixtureConfig | None:
    """How the decoder mixes experts; None if it has none."""
    values = config.model.experts.model_dump()
    return None if values["count"] is None else MixtureConfig(**values | {"ffn_dim": values["ffn_dim"] or ffn_dim})


def _attention_pattern(config: Config) -> AttentionPattern | None:
    """The decoder's sliding windows or prefix mask; None for causal attention."""
    attention = config.model.attention
    return AttentionPattern(**attention.model_dump()) if attention.is_set else None


def prepare_model(config: Config, tokenizer: Tokenizer | None = None) -> nn.Module:
    """The model on the meta device, with adapters, activation checkpointing and compilation, ready to shard.

    Its storage is allocated and initialised unit by unit while it is sharded, so no rank ever holds all of it.
    """
    spec = decoder_config(config, tokenizer) if config.model.kind == "decoder" else config.model.path
    assert spec is not None
    model = objective_of(config).build(spec)
    units = config.plan.units
    mode, every = config.train.checkpointing
    ops, offload = config.train.activation_checkpointing_ops, config.offload.activations == "cpu"
    take_targets(model, config)
    convert_linears(model, config)
    checkpoint_activations(model, mode, units=units, every=every, ops=ops, offload=offload)
    if config.train.compile:
        compile_units(model, units=units)
    return model


class ModelOnPaper:
    """The model of a configuration on the meta device, for checks: built once, when it is first used.

    It is not compiled: the compiler takes seconds to load, and changes no name and no tensor.
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    @cached_property
    def model(self) -> nn.Module:
        """The whole model, which callers must not change.

        Raises:
            BadInput: it cannot be built as the configuration says.
        """
        as_it_is = self._config.train.model_copy(update={"compile": False})
        return prepare_model(self._config.model_copy(update={"train": as_it_is}))

    def copy(self) -> nn.Module:
        """A copy that may be changed."""
        return copy.deepcopy(self.model)
