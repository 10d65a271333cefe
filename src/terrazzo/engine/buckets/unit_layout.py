"""A unit before anything is allocated: its module, and how its parameters are laid out in buckets."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from terrazzo.engine.buckets.bucket_layout import BucketLayout
from terrazzo.engine.comm.comm_streams import CommStreams
from terrazzo.engine.labels.numbered import unit_title
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.runtime.compiled import compilation_of, has_fixed_addresses

__all__ = ["UnitLayout", "weights_are_split"]


class UnitLayout:
    """The parameters that are gathered and reduced together, normally one transformer block's, in buckets.

    Args:
        names: of all units of the model.
        index: position in the order of registration, root first.

    Attributes:
        name: of its module in the model; empty for the root.
        forward_only: as of `UnitSpec`.
    """

    buckets: Sequence[BucketLayout]

    def __init__(
        self,
        names: tuple[str, ...],
        index: int,
        module: nn.Module,
        buckets: Sequence[BucketLayout],
        forward_only: bool,
    ) -> None:
        self.names, self.index, self.buckets, self.forward_only = names, index, buckets, forward_only
        self.name = names[index]
        self._module = weakref.ref(module)  # the module's hooks lead to its unit: a strong edge back would be a cycle

    @property
    def title(self) -> str:
        """Name of the unit in messages."""
        return unit_title(self.name)

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

    def trainable(self) -> Iterator[BucketLayout]:
        """Yield the buckets of parameters that are trained."""
        return (bucket for bucket in self.buckets if bucket.spec.trainable)


def weights_are_split(units: Iterable[UnitLayout]) -> bool:
    """Whether weights at rest are, so that a rank can need those of another in the middle of a pass."""
    return any(bucket.spec.weight_axes for unit in units for bucket in unit.buckets)
