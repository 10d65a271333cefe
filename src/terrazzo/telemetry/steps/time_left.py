"""How long a run still takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from terrazzo.telemetry.log.records import STARTS
from terrazzo.telemetry.log.step_record import StepRecord

__all__ = ["TimeLeft"]


class TimeLeft:
    """Seconds to the end of a run, by the mean of its steps since this start and of what came between them.

    The first record is left out: it has what is done only once.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._records, self._steps, self._seconds = 0, 0.0, 0.0

    def read(self, line: Mapping[str, Any]) -> None:
        """The next line of a run's `metrics.jsonl`."""
        if line["kind"] in STARTS:
            self._begin()
        elif line["kind"] == "step" and line.get("steps") and line.get("step_s"):
            self.take(cast(StepRecord, line))

    def take(self, record: StepRecord) -> None:
        """One more record."""
        self._records += 1
        if self._records > 1:
            self._steps += record["steps"]
            self._seconds += record["steps"] * record["step_s"]

    def after(self, step: int, steps: int, step_s: float) -> float:
        """Seconds from the end of `step` to that of the run's last; `step_s`: of a step, where there is no mean yet."""
        return max(0, steps - step) * (self._seconds / self._steps if self._steps else step_s)
