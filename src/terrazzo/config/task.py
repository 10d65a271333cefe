"""The sections `model`, `lora`, `data` and `objective`: what is trained on what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from terrazzo.config.attention import AttentionConfig
from terrazzo.config.experts import ExpertsConfig
from terrazzo.config.section import Named, Section

__all__ = ["DataConfig", "LoraConfig", "ModelConfig", "ObjectiveConfig", "ObjectiveKind"]


class ModelConfig(Section):
    """Which model is trained: the built-in decoder by its sizes, or a Hugging Face causal LM by folder."""

    kind: Literal["decoder", "huggingface"] = Field(
        "decoder", description="`decoder`: the built-in one. `huggingface`: a causal LM of `transformers`"
    )
    path: Path | None = Field(None, description="huggingface: local folder with config.json (and safetensors)")
    weights: Literal["random", "pretrained"] = Field(
        "random", description="`random`, or for huggingface `pretrained`: the folder's safetensors"
    )
    vocab_size: int | None = Field(None, gt=0, description="decoder: default: the tokenizer's")
    dim: int = Field(256, gt=0, description="decoder: width of the residual stream")
    layers: int = Field(6, gt=0, description="decoder: number of blocks")
    heads: int = Field(4, gt=0, description="decoder: query heads per block")
    kv_heads: int | None = Field(None, gt=0, description="decoder: key and value heads; default: as many as heads")
    ffn_dim: int | None = Field(None, gt=0, description="decoder: width of the MLP; default: 8/3 dim, in steps of 64")
    tie_embeddings: bool = Field(True, description="decoder: the head is the embedding matrix")
    rope_theta: float = Field(10_000.0, gt=0, description="decoder: base of the rotary position embedding")
    dropout: float = Field(0.0, ge=0, lt=1, description="decoder: share of each block's output dropped in training")
    experts: ExpertsConfig = ExpertsConfig()
    attention: AttentionConfig = AttentionConfig()

    def _agrees(self) -> None:
        if self.kind == "huggingface" and self.path is None:
            raise ValueError("kind 'huggingface' needs model.path, a local folder holding config.json")
        if self.kind == "decoder" and (self.path is not None or self.weights == "pretrained"):
            raise ValueError("path and weights 'pretrained' belong to kind 'huggingface': the decoder starts at random")
        if self.kind == "huggingface" and self.experts.count is not None:
            raise ValueError("experts belong to kind 'decoder': a folder's config.json has its own. Remove the section")
        if self.kind == "huggingface" and self.attention.window is not None:
            raise ValueError(
                "attention belongs to kind 'decoder': a folder's config.json says how far its model sees, with"
                " sliding_window and layer_types where its model_type has them. Remove the section, and edit that file"
            )
        full_every = self.attention.full_every
        if self.kind == "decoder" and full_every is not None and full_every > self.layers:
            raise ValueError(
                f"attention.full_every {full_every} with {self.layers} layers has none without a window: lower it, or"
                " leave it out"
            )


class LoraConfig(Section):
    """Low-rank adapters on a frozen Hugging Face model; off without a rank."""

    rank: int | None = Field(None, gt=0, description="width of the adapters; null: none, all weights are trained")
    alpha: float = Field(16.0, gt=0, description="adapters count alpha / rank times")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of an adapter's inputs dropped in training")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="names of linear layers such as q_proj; all-linear: all but the head"
    )
    bias: Literal["none", "all", "lora_only"] = Field(
        "none", description="biases trained too: `none`, `all`, or the targets': `lora_only`"
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "all-linear":
            raise ValueError(f"'{value}' is a single word: give a list of names, [{value}], or 'all-linear'")
        return value

    def _agrees(self) -> None:
        set_here = sorted(self.model_fields_set - {"rank"})
        if self.rank is None and set_here and self != LoraConfig():
            raise ValueError(
                f"{', '.join(set_here)} without lora.rank: set lora.rank, such as 8, or remove the section"
            )
        if not self.target_modules:
            raise ValueError("target_modules is empty: name layers, or leave it out for 'all-linear'")


class DataConfig(Section):
    """Where the text comes from and how it becomes tokens."""

    source: str | list[str] = Field("python-stdlib", description="'python-stdlib', or files, folders, globs, URLs")
    text_field: str = Field("text", description="field of JSONL and parquet rows that holds the text")
    chat_template: Path | None = Field(None, description="file with a chat template; default: the tokenizer's own")
    loss_on: Literal["assistant", "all"] = Field(
        "assistant", description="conversations: which tokens are learnt: the `assistant`'s, or `all`"
    )
    packing: Literal["stream", "whole", "single"] | None = Field(
        None,
        description="documents in sequences; default: stream for text, single for conversations. `stream` cuts them "
        "where a sequence ends, `whole` puts as many as fit into one, `single` one",
    )
    attention: Literal["sequence", "document"] = Field(
        "sequence",
        description="how far a token sees: all of its `sequence` before it, or of its own `document`, where positions"
        " begin anew",
    )
    too_long: Literal["truncate", "drop"] = Field(
        "truncate", description="whole, single: documents longer than a sequence: `truncate` them or `drop` them"
    )
    tokenizer: str = Field("bytes", description="'bytes', or the local path of a Hugging Face tokenizer")
    end_of_document: str | None = Field(None, description="the token that ends a document; default: the tokenizer's")
    max_bytes: int | None = Field(None, gt=0, description="read at most this many bytes of text from each source")
    validation_source: str | list[str] | None = Field(None, description="default: a part of source is held out")
    validation_fraction: float = Field(0.05, ge=0, lt=0.5, description="share of the tokens held out; 0: none")
    cache: Path | None = Field(None, description="folder of the token cache; default: the user's cache folder")


@dataclass(frozen=True)
class ObjectiveKind:
    """What an objective asks of data, model and configuration. Its loss is in `train.model.objectives`.

    Attributes:
        of_pairs: a sample is a preference pair, two sequences.
        against_initial: the model is compared with what it was before its first step. Nothing is dropped in either,
            since that would be a difference.
        scored: the model ends in one score of a whole text, and writes none.
    """

    of_pairs: bool = False
    against_initial: bool = False
    scored: bool = False


OBJECTIVES = {
    "next_token": ObjectiveKind(),
    "dpo": ObjectiveKind(of_pairs=True, against_initial=True),
    "reward": ObjectiveKind(of_pairs=True, scored=True),
}


class ObjectiveConfig(Named):
    """What the model learns: the next token, or which of two completions is preferred."""

    name: Literal["next_token", "dpo", "reward"] = Field(
        "next_token",
        description="`next_token`: cross-entropy. `dpo`: direct preference optimization against the initial model."
        " `reward`: a score for a whole text (Bradley-Terry). Both take preference pairs",
    )
    loss: Literal["auto", "chunked", "full"] = Field(
        "auto",
        description="next_token: `full` has all logits of a micro-batch at once, `chunked` those of some tokens, and"
        " forms their gradients meanwhile. `auto`: chunked from 2^24 logits of a micro-batch on, where it can be",
    )
    beta: float = Field(0.1, gt=0, description="dpo: how closely the model is kept to the initial one")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="dpo: probability that a pair's order is wrong")

    @property
    def kind(self) -> ObjectiveKind:
        """What follows from the name."""
        return OBJECTIVES[self.name]

    def _agrees(self) -> None:
        set_here = [
            key for key in ("beta", "label_smoothing") if getattr(self, key) != type(self).model_fields[key].default
        ]
        if set_here and self.name != "dpo":
            raise ValueError(
                f"{', '.join(set_here)} without name 'dpo', which alone reads it: set name to 'dpo', or remove it"
            )
