"""What a line of kind `step` says: `docs/concepts/step-record.md` describes every field."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

__all__ = ["RECORD_VERSION", "ExchangeRow", "StepParts", "StepRecord"]

RECORD_VERSION = 1
"""Of the fields of a `StepRecord`: its `v`. Records of others are not read."""

StepParts = Literal["cause_s", "phase_s"]
"""Fields that part a step: their seconds add up to it."""


class ExchangeRow(TypedDict, total=False):
    """One kind of exchange along one axis, per step. On CUDA there are no times; of a script no bytes, nor when an
    exchange has ended that it does not wait for at once, so that `total_s` is not known.
    """

    n: float
    sent_bytes: float
    total_s: float
    exposed_s: float
    late_s: float


class StepRecord(TypedDict):
    """Means over `steps` steps. `kind` and `step` are there in a file alone; other `NotRequired` keys are not in
    records of CUDA, of other loops than the trainer's, or of earlier versions.
    """

    kind: NotRequired[Literal["step"]]
    step: NotRequired[int]
    v: int
    steps: int
    step_s: float
    clock: Literal["all", "host"]
    phase_s: dict[str, float]
    cause_s: NotRequired[dict[str, float]]
    starved: NotRequired[float]
    comm: NotRequired[dict[str, ExchangeRow]]
    memory_bytes: NotRequired[dict[str, int]]
    promised: NotRequired[dict[str, Any]]
    skew: NotRequired[dict[str, list[float]]]
