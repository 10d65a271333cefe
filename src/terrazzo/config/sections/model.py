"""The section `model`: which model is trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from terrazzo.config.section import KeyDisagreement, Section
from terrazzo.config.sections.attention import AttentionConfig
from terrazzo.config.sections.experts import ExpertsConfig

__all__ = ["ModelConfig", "head_faults"]


class ModelConfig(Section):
    """Which model is trained: the built-in decoder by its sizes, or a Hugging Face causal LM by folder."""

    kind: Literal["decoder", "huggingface"] = Field(
        "decoder", description="`decoder`: the built-in one. `huggingface`: a causal LM of `transformers`"
    )
    path: Path | None = Field(
        None, description="huggingface: local folder with config.json (and safetensors); null: the decoder has none"
    )
    weights: Literal["random", "pretrained"] = Field(
        "random", description="`random`, or for huggingface `pretrained`: the folder's safetensors"
    )
    vocab_size: int | None = Field(None, gt=0, description="decoder: number of tokens; null: the tokenizer's")
    dim: int = Field(256, gt=0, description="decoder: width of the residual stream")
    layers: int = Field(6, gt=0, description="decoder: number of blocks")
    heads: int = Field(4, gt=0, description="decoder: query heads per block")
    kv_heads: int | None = Field(None, gt=0, description="decoder: key and value heads; null: as many as heads")
    ffn_dim: int | None = Field(None, gt=0, description="decoder: width of the MLP; null: 8/3 dim, in steps of 64")
    tie_embeddings: bool = Field(True, description="decoder: the head is the embedding matrix")
    rope_theta: float = Field(10_000.0, gt=0, description="decoder: base of the rotary position embedding")
    dropout: float = Field(0.0, ge=0, lt=1, description="decoder: share of each block's output dropped in training")
    experts: ExpertsConfig = ExpertsConfig()
    attention: AttentionConfig = AttentionConfig()

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        if self.kind == "huggingface" and self.path is None:
            yield KeyDisagreement("kind", "'huggingface' needs model.path, a local folder holding config.json")
        if self.kind == "decoder" and (self.path is not None or self.weights == "pretrained"):
            yield KeyDisagreement(
                "path", "and weights 'pretrained' belong to kind 'huggingface': the decoder starts at random"
            )
        if self.kind == "huggingface" and self.experts.count is not None:
            yield KeyDisagreement(
                "experts", "belong to kind 'decoder': a folder's config.json has its own. Remove the section"
            )
        if self.kind == "huggingface" and self.attention.window is not None:
            yield KeyDisagreement(
                "attention",
                "belongs to kind 'decoder': a folder's config.json says how far its model sees, with"
                " sliding_window and layer_types where its model_type has them. Remove the section, and edit that file",
            )
        if self.kind == "huggingface" and self.attention.prefix:
            yield KeyDisagreement(
                "attention.prefix",
                "belongs to kind 'decoder': causal LMs of transformers have no prefix mask. Remove it, or set"
                " model.kind to 'decoder'",
            )
        if self.kind == "decoder":
            faults = head_faults(self.dim, self.heads, self.kv_heads or self.heads)
            yield from (KeyDisagreement(key, why) for key, why in faults)
        full_every = self.attention.full_every
        if self.kind == "decoder" and full_every is not None and full_every > self.layers:
            yield KeyDisagreement(
                "attention.full_every",
                f"{full_every} with {self.layers} layers has none without a window: lower it, or leave it out",
            )


def head_faults(dim: int, heads: int, kv_heads: int) -> Iterator[tuple[str, str]]:
    """Sizes of the decoder's attention that do not divide: the key, and what a message says behind it."""
    if dim % (2 * heads):
        yield (
            "dim",
            (
                f"{dim} split over model.heads {heads} must give each head an even whole number of channels, since"
                f" rotary positions turn them in pairs: make model.dim a multiple of 2 × heads = {2 * heads}"
            ),
        )
    if heads % kv_heads:
        yield (
            "heads",
            (
                f"{heads} is not a multiple of model.kv_heads {kv_heads}, so the query heads cannot share the key-value"
                f" heads evenly: set model.kv_heads to a divisor of {heads}"
            ),
        )
