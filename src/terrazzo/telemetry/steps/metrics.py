"""The numbers of a log step, as one record, and a stopwatch for them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["StepMetrics", "Stopwatch"]


@dataclass(frozen=True)
class StepMetrics:
    """One log step. Rates and shares are over the steps since the previous one; None where not known.

    `learning_rate` is the step's own. `tokens_per_s` counts all ranks; `tflops`, `mfu` and `hfu` are per rank.
    `mfu` is of the model's own FLOPs, frozen weights without their gradients and experts as far as they are active;
    `hfu` counts what checkpointing computes again, too, so it is what the device does.
    Shares (`data_wait`, `communication`) are of wall-clock time, from 0 to 1: `communication` is the time this rank
    stood waiting for others, whatever for, not known on CUDA, where the device waits and not the process.
    Of experts, in the newest step: `expert_imbalance` is the rows of the busiest one as a multiple of the mean,
    `router_entropy` that of tokens' scores in nats.
    """

    step: int
    loss: float
    learning_rate: float
    tokens: int
    step_s: float
    tokens_per_s: float
    data_wait: float
    peak_memory_bytes: int
    communication: float | None = None
    grad_norm: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None
    disk_read_gb_s: float | None = None
    disk_write_gb_s: float | None = None
    cpu_step_gparam_s: float | None = None
    expert_imbalance: float | None = None
    router_entropy: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Every known value by name. A loss or a norm that is not finite is left out: JSON has no infinity."""
        return {key: value for key, value in asdict(self).items() if value is not None and math.isfinite(value)}


class Stopwatch:
    """Wall-clock seconds since the last reset, in total and inside `measure()`; pauses can be taken out."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        self._start = time.perf_counter()
        self._paused_s = 0.0
        self.measured_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds since the reset, without pauses."""
        return time.perf_counter() - self._start - self._paused_s

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the seconds inside as measured."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.measured_s += time.perf_counter() - start

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the seconds inside out of the total: evaluation, samples, checkpoints."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - start
