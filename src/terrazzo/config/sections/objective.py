"""The section `objective`: what the model learns, and what that asks of data and model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from terrazzo.config.section import KeyDisagreement, Named

__all__ = ["OBJECTIVES", "ObjectiveConfig", "ObjectiveKind"]


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
        """What the objective asks of data, model and other sections."""
        return OBJECTIVES[self.name]

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        for key in self.changed_keys("beta", "label_smoothing") if self.name != "dpo" else ():
            yield KeyDisagreement(
                key, "without objective.name 'dpo', which alone reads it: set objective.name to 'dpo', or remove it"
            )
