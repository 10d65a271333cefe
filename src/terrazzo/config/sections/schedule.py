"""The section `schedule`: the learning rate over the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from terrazzo.config.section import KeyDisagreement, Named

__all__ = ["ScheduleConfig"]


class ScheduleConfig(Named):
    """The learning rate as a share of `optimizer.lr` over the run."""

    name: Literal["constant", "cosine", "linear", "wsd"] = Field(
        "cosine", description="shape of the learning rate; wsd: warm-up, stable, decay"
    )
    warmup_steps: int = Field(0, ge=0, description="linear warm-up; at most train.steps")
    final_fraction: float = Field(0.1, ge=0, le=1, description="share of the peak that is left at the last step")
    decay_steps: int | None = Field(None, gt=0, description="wsd: length of the final decay; null: a fifth")

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        if self.decay_steps is not None and self.name != "wsd":
            yield KeyDisagreement("decay_steps", f"belongs to schedule 'wsd', this one is '{self.name}': remove it")
