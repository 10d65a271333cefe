"""A unit: the parameters that are gathered and reduced together, normally one transformer block's."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.unit_weights import UnitWeights
from terrazzo.engine.comm.comm_streams import CommStreams
from terrazzo.engine.comm.transfer import Moves
from terrazzo.engine.instrumentation.label import title_of
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.moves import Divisor, GradientFate
from terrazzo.engine.runtime.compiled import compilation_of, has_fixed_addresses

__all__ = ["Unit"]


class Unit:
    """One unit's buckets. It implements `Runnable` of the schedule, which documents the methods without a docstring.

    Args:
        names: of all units of the model.
        index: position in the order of registration, root first.

    Attributes:
        name: of its module in the model; empty for the root.
        weights: of all its buckets.
        forward_only: as of `UnitSpec`.
    """

    def __init__(
        self, names: tuple[str, ...], index: int, module: nn.Module, buckets: list[Bucket], forward_only: bool
    ) -> None:
        self.names, self.index, self.buckets, self.forward_only = names, index, buckets, forward_only
        self.name = names[index]
        self._module = weakref.ref(module)  # the module's hooks lead here: a strong edge back would be a cycle
        self.weights = UnitWeights(names, index, buckets)
        self._trainable_numel = sum(math.prod(m.shape) for bucket in self.trainable() for m in bucket.members)

    def __repr__(self) -> str:
        return f"<{self.title}, {self.numel:,} elements>"

    @property
    def title(self) -> str:
        """Name of the unit in messages."""
        return title_of(self.name)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the model is gone"
        return module

    @property
    def specs(self) -> Sequence[BucketSpec]:
        """Descriptions of its buckets."""
        return [bucket.spec for bucket in self.buckets]

    @property
    def is_root(self) -> bool:
        return not self.name

    @property
    def numel(self) -> int:
        """Elements of the unit's flat spaces, padding included."""
        return sum(bucket.space.layout.numel for bucket in self.buckets)

    @property
    def comm_streams(self) -> CommStreams | None:
        return self.buckets[0].axes.comm_streams

    @property
    def compiled(self) -> bool:
        """Whether torch has compiled its module."""
        return compilation_of(self._module()) is not None

    @property
    def captured(self) -> bool:
        """Whether torch runs it as a CUDA graph, which reads weights at fixed addresses."""
        return has_fixed_addresses(compilation_of(self._module()))

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
        """Yield the buckets of parameters that are trained."""
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
