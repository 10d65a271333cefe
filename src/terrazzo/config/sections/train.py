"""The section `train`: the loop."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import Field, field_validator

from terrazzo.config.section import KeyDisagreement, Section
from terrazzo.messages import did_you_mean
from terrazzo.words import CHECKPOINT_MODES, CheckpointMode

__all__ = ["TrainConfig"]


class TrainConfig(Section):
    """The loop."""

    steps: int = Field(1000, gt=0, description="optimizer steps")
    clip: float | None = Field(1.0, gt=0, description="largest global gradient norm; null: no clipping")
    seed: int = Field(0, ge=0, lt=2**63, description="of initial weights, data order, dropout and samples")
    eval_every: int | None = Field(None, gt=0, description="steps between evaluations; null: only at the end")
    eval_batches: int = Field(
        8, gt=0, description="micro-batches per rank in one evaluation: of more or larger ones the loss is of more text"
    )
    sample_every: int | None = Field(None, gt=0, description="steps between text samples; null: only at the end")
    check_replicas_every: int | None = Field(
        None,
        gt=0,
        description="steps between comparisons of ranks' copies of weights and optimizer states, which end the run "
        "when one differs; null: never",
    )
    sample_tokens: int = Field(128, ge=0, description="length of a text sample; 0: none at all")
    sample_prompt: str = Field("\n", description="what a text sample begins with")
    sample_chat: str | None = Field(
        None,
        description="a user's message; a sample is then its answer by the chat template, the likeliest tokens; null: "
        "none",
    )
    activation_checkpointing: str = Field(
        "none", description=f"{', '.join(CHECKPOINT_MODES)}, or every_N such as every_2"
    )
    activation_checkpointing_ops: list[str] | None = Field(
        None, description="selective: operators kept, not redone; null: products and attention"
    )
    compile: bool = Field(False, description="torch.compile for each unit")

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        if self.sample_chat is not None and self.changed_keys("sample_prompt"):
            yield KeyDisagreement(
                "sample_prompt", "and sample_chat: give one of them, what a text begins with or what is asked"
            )
        if self.activation_checkpointing_ops is not None and self.activation_checkpointing != "selective":
            yield KeyDisagreement(
                "activation_checkpointing_ops",
                f"are kept by 'selective' alone, and activation_checkpointing is '{self.activation_checkpointing}': set"
                " train.activation_checkpointing to 'selective', or leave train.activation_checkpointing_ops out",
            )

    @field_validator("activation_checkpointing")
    @classmethod
    def _known_mode(cls, value: str) -> str:
        if value not in CHECKPOINT_MODES and not re.fullmatch(r"every_[1-9][0-9]{0,8}", value):
            modes = (*CHECKPOINT_MODES, "every_N")
            near = did_you_mean(value, modes)
            raise ValueError(f"'{value}' is not one of {', '.join(modes)} (such as every_2).{near}".rstrip("."))
        return value

    @property
    def checkpointing(self) -> tuple[CheckpointMode, int]:
        """The mode, and that one unit in so many is recomputed: `every_2` is `("full", 2)`."""
        mode, _, every = self.activation_checkpointing.partition("every_")
        return ("full", int(every)) if every else (mode, 1)  # type: ignore[return-value]  # as the pattern has it
