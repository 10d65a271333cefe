"""The numbers of a log step, and the stopwatch that measures them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["StepMetrics", "Stopwatch"]


@dataclass(frozen=True)
class StepMetrics:
    """One log step. Rates and shares are over the steps since the previous log step; None if not known.

    Attributes:
        step: number of finished steps.
        loss: of this step, the mean over all ranks, in nats per token learnt or per preference pair.
        learning_rate: that this step was taken with.
        tokens: tokens learnt since the run began, over all ranks.
        step_s: wall-clock seconds per step, without evaluations, samples and saves.
        tokens_per_s: tokens learnt per second, over all ranks.
        data_wait: share of the time that this rank waited for data, from 0 to 1.
        peak_memory_bytes: this rank's highest memory use so far; see `PeakMemory`.
        communication: share of the time that this rank waited for others, from 0 to 1; None for a single rank. Not
            known on CUDA, where the device waits and not the process.
        grad_norm: global norm of this step's gradients, before clipping.
        tflops: of the model per second and rank, in 1e12; on CUDA only.
        mfu: these as a share of the device's peak. FLOPs are the model's own: no gradients of frozen weights, and of
            experts the active ones.
        hfu: the same with what activation checkpointing computes again: what the device really does.
        loss_scale, skipped_steps: of fp16; steps are counted since the run began.
        disk_read_gb_s, disk_write_gb_s: rates of swap files, in 1e9 bytes per second.
        cpu_step_gparam_s: parameters updated on the CPU, in 1e9 per second.
        expert_imbalance: in this step, the rows of the busiest expert as a multiple of the mean.
        router_entropy: in this step, the entropy of the routers' scores of a token, in nats.
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
        """Every known finite value by name: JSON has no infinity."""
        return {key: value for key, value in asdict(self).items() if value is not None and math.isfinite(value)}


class Stopwatch:
    """Wall-clock seconds since the last reset, in total and within `measure()`; the total leaves `pause()` out."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        self._start = self._clock()
        self._paused_s = 0.0
        self.measured_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the reset."""
        return self._clock() - self._start

    @property
    def total_s(self) -> float:
        """Seconds since the reset, without pauses."""
        return self.elapsed_s - self._paused_s

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the seconds inside as measured."""
        start = self._clock()
        try:
            yield
        finally:
            self.measured_s += self._clock() - start

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the seconds inside out of the total: evaluation, samples, checkpoints."""
        start = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - start
