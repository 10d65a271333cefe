"""The section `guard`: what is done about a step that is not like those before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from terrazzo.config.section import KeyDisagreement, Section

__all__ = ["GuardConfig"]


class GuardConfig(Section):
    """What is done about a step whose loss or gradients are not finite, or a spike, and about a rank that computes
    wrongly.
    """

    action: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="`stop`: end the run; `skip`: leave the weights as they are and go on with the next batch; "
        "`rollback`: go back to the newest checkpoint, and around the batches since",
    )
    spike: float | None = Field(
        None,
        gt=0,
        description="a loss or a norm is a spike so many deviations above the median of the steps before it; null: "
        "only what is not finite counts",
    )
    window: int = Field(100, ge=8, description="spike: steps before it that it is compared with, at least 8")
    skip_batches: int = Field(0, ge=0, description="rollback: batches behind that of the spike that are left out too")
    limit: int = Field(10, gt=0, description="skips and rollbacks of a run; one more ends it")
    replay_every: int | None = Field(
        None,
        gt=0,
        description="steps between replays: ranks compute a micro-batch of each other's again, and the run ends, "
        "naming the rank, where their gradients differ; one takes as long as two micro-batches; null: never",
    )
    memory_every: int | None = Field(
        None,
        gt=0,
        description="steps between looks at the memory of a unit, one after the other: the run ends, naming the rank, "
        "where a state is not what the update before has left, or gathered weights are others; null: never",
    )

    @property
    def acts(self) -> bool:
        """Whether each step is judged before its update: a step may be skipped, undone, or end the run as a spike."""
        return self.action != "stop" or self.spike is not None

    def _disagreements(self) -> Iterator[KeyDisagreement]:
        if self.skip_batches and self.action != "rollback":
            yield KeyDisagreement(
                "skip_batches", f"belongs to action 'rollback', and this one is '{self.action}': remove it"
            )
        if self.changed_keys("window") and self.spike is None:
            yield KeyDisagreement("window", "without guard.spike: set guard.spike, such as 8, or remove it")
