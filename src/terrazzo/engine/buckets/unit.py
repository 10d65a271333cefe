"""A unit: the parameters that are gathered and reduced together, normally one transformer block's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.unit_layout import UnitLayout
from terrazzo.engine.buckets.unit_weights import UnitWeights
from terrazzo.engine.comm.transfer import Moves
from terrazzo.engine.plan.moves import Divisor, GradientFate

__all__ = ["Unit"]


class Unit(UnitLayout):
    """One unit's buckets. It implements `Runnable` of the schedule, which documents the methods without a docstring.

    Attributes:
        weights: of all its buckets.
    """

    buckets: Sequence[Bucket]

    def __init__(self, laid_out: UnitLayout, buckets: Sequence[Bucket]) -> None:
        super().__init__(laid_out.names, laid_out.index, laid_out.module, buckets, laid_out.forward_only)
        self.weights = UnitWeights(self.names, self.index, buckets)
        self._trainable_numel = sum(math.prod(m.shape) for bucket in self.trainable() for m in bucket.members)

    def __repr__(self) -> str:
        return f"<{self.title}, {self.numel:,} elements>"

    @property
    def numel(self) -> int:
        """Elements of the unit's flat spaces, padding included."""
        return sum(bucket.space.layout.numel for bucket in self.buckets)

    @property
    def fills_gradually(self) -> bool:
        return self.has_gradients and not self.compiled  # whose gradients come all at its end

    # -- gradients ---------------------------------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        return any(bucket.spec.trainable for bucket in self.buckets)

    def sum_tied(self) -> None:
        for bucket in self.trainable():
            if bucket.spec.tied_ranks:
                bucket.gradient.sum_tied()

    @property
    def half_filled(self) -> bool:
        return 2 * sum(bucket.gradient.filled_numel for bucket in self.buckets) >= self._trainable_numel

    def trainable(self) -> Iterator[Bucket]:
        return (bucket for bucket in self.buckets if bucket.spec.trainable)

    def expect_gradients(self, fate: GradientFate) -> None:
        for bucket in self.trainable():
            bucket.gradient.expect(fate)

    def reduce(self, divisor: Divisor, fate: GradientFate) -> Moves[list[Tensor]]:
        sums = []
        for bucket in self.trainable():
            sums.append((yield from bucket.gradient.reduce(divisor, fate)))  # noqa: PERF401 - which cannot yield
        return sums  # held until the computation may use them

    def zero_grad(self, set_to_none: bool) -> None:
        for bucket in self.trainable():
            bucket.zero_grad(set_to_none)
