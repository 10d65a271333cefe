"""The section `lora`: adapters on a frozen model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from terrazzo.config.section import KeyDisagreement, Section

__all__ = ["LoraConfig"]


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
            names = json.dumps([value], ensure_ascii=False)
            raise ValueError(f"'{value}' is a single word: give a list of names, {names}, or 'all-linear'")
        return value

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        for key in self.changed_keys() if self.rank is None else ():
            yield KeyDisagreement(key, "without lora.rank: set lora.rank, such as 8, or remove it")
        if not self.target_modules:
            yield KeyDisagreement("target_modules", "is empty: name layers, or leave it out for 'all-linear'")
