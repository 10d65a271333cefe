"""The section `data`: where the text comes from, and how it becomes tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from terrazzo.config.section import Section

__all__ = ["DataConfig"]


class DataConfig(Section):
    """Where the text comes from and how it becomes tokens."""

    source: str | list[str] = Field("python-stdlib", description="'python-stdlib', or files, folders, globs, URLs")
    text_field: str = Field("text", description="field of JSONL and parquet rows that holds the text")
    chat_template: Path | None = Field(None, description="file with a chat template; null: the tokenizer's own")
    loss_on: Literal["assistant", "all"] = Field(
        "assistant", description="conversations: which tokens are learnt: the `assistant`'s, or `all`"
    )
    packing: Literal["stream", "whole", "single"] | None = Field(
        None,
        description="documents in sequences: `stream` cuts them where a sequence ends, `whole` puts as many as fit "
        "into one, `single` one; null: stream for text, single for conversations",
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
    end_of_document: str | None = Field(None, description="the token that ends a document; null: the tokenizer's")
    max_bytes: int | None = Field(None, gt=0, description="of text that are read of each source; null: all")
    validation_source: str | list[str] | None = Field(
        None, description="like source, of validation; null: a part of source is held out"
    )
    validation_fraction: float = Field(0.05, ge=0, lt=0.5, description="share of the tokens held out; 0: none")
    cache: Path | None = Field(None, description="folder of the token cache; null: the user's cache folder")
