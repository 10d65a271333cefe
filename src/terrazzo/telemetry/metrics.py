"""What is measured at a log step, and how it reads on one line."""

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

    `learning_rate` is that of the step to come. `tokens_per_s` counts all ranks; `tflops` and `mfu` are per rank.
    Shares (`data_wait`, `communication`) are of wall-clock time, from 0 to 1: `communication` is the time this rank
    stood waiting for collectives, not known on CUDA, where the device waits and not the process.
    """

    step: int
    loss: float
    learning_rate: float
    tokens: int
    step_s: float
    tokens_per_s: float
    data_wait: float
    communication: float | None
    peak_memory_bytes: int
    grad_norm: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None
    disk_read_gb_s: float | None = None
    disk_write_gb_s: float | None = None
    cpu_step_gparam_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Every known value by name. An overflowing gradient norm is left out: JSON has no infinity."""
        return {key: value for key, value in asdict(self).items() if value is not None and math.isfinite(value)}

    def line(self, steps: int) -> str:
        """One console line; `steps` is the length of the run."""
        norm = f"{self.grad_norm:.3f}" if self.grad_norm is not None else "n/a"
        tflops = f"{self.tflops:.3g}" if self.tflops is not None else "n/a"
        mfu = f"{self.mfu:.1%}" if self.mfu is not None else "n/a"
        communication = f"{self.communication:.0%}" if self.communication is not None else "n/a"
        skipped = f" | skipped {self.skipped_steps}" if self.skipped_steps else ""
        disk = "" if self.disk_read_gb_s is None else f" | disk in {self.disk_read_gb_s:.2f} GB/s"
        disk += "" if self.disk_write_gb_s is None else f" | disk out {self.disk_write_gb_s:.2f} GB/s"
        cpu = "" if self.cpu_step_gparam_s is None else f" | CPU step {self.cpu_step_gparam_s:.2f} Gparam/s"
        return (
            f"step {self.step:>{len(str(steps))}}/{steps} | loss {self.loss:.4f} | grad norm {norm}"
            f" | lr {self.learning_rate:.2e} | {self.tokens_per_s:,.0f} tok/s | {tflops} TFLOP/s | MFU {mfu}"
            f" | peak {self.peak_memory_bytes / 2**30:.2f} GiB | data {self.data_wait:.0%} | comm"
            f" {communication}{disk}{cpu}{skipped}"
        )


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
