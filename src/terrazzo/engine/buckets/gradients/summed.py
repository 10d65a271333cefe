"""A gradient that has been summed over ranks, at rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import Resting
from terrazzo.engine.comm.sums import multiply
from terrazzo.engine.plan.layout import Range
from terrazzo.engine.runtime.worker import Job

__all__ = ["SummedGradient"]


@dataclass(eq=False)
class SummedGradient:
    """A finished gradient, or a sum of micro-batches on its way to being one.

    Attributes:
        data: where it rests.
        landing: the job that brings the data to where they rest; None once it has ended.
        factor: the clipping factor that has not been applied yet; None for none.
    """

    data: Resting
    landing: Job | None = None
    factor: Tensor | None = None

    def wait(self) -> Resting:
        """Return the data once they have landed."""
        if self.landing is not None:
            self.landing.wait()
            self.landing = None
        return self.data

    def change(self, change: Callable[[Tensor], object], wanted: Range | None = None) -> None:
        """Change what is held of `wanted`, or all of it, part by part in memory."""
        data = self.wait()
        for part in data.cuts(wanted or data.range):
            with data.opened(part, "change") as elements:
                change(elements)

    def put_off(self, factor: Tensor) -> None:
        """Note a factor, on the device, by which whoever uses the data multiplies them; the host waits for nothing."""
        self.apply_factor()
        self.factor = factor

    def scaled(self, part: Tensor) -> Tensor:
        """Multiply `part` of the data, or of a copy, in place by the factor that was put off, and return it."""
        return part if self.factor is None else multiply(part, self.factor)

    def apply_factor(self) -> None:
        """Multiply by the factor that was put off: the elements are about to change."""
        if self.factor is not None:
            self.change(self.scaled)
            self.factor = None
