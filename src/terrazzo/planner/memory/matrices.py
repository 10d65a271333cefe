"""Updates of whole matrices, planned: what the first rank of each axis sends and holds for them, and what they compute.

Which rank owns which matrix, what goes where and what is held on the way is the engine's own code
(`terrazzo.engine.optim.matrices`). It asks of a bucket what is in `GroupedBucket`, which the engine's own and a
`SizedBucket` have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.instrumentation.traffic import Traffic
from terrazzo.engine.optim.matrices.matrix_owners import CUT, Owners, owners_of
from terrazzo.engine.optim.matrices.matrix_steps import dry_run_matrices
from terrazzo.engine.optim.segments.group_runs import GroupedAxis
from terrazzo.engine.partition.box import Box
from terrazzo.engine.plan.layout import Layout, Range, Slot, share
from terrazzo.engine.plan.precision import Precision
from terrazzo.planner.caching import once
from terrazzo.planner.layout.buckets import MATRICES, PlannedBucket, buckets
from terrazzo.planner.layout.placement import PlacedUnit, Placement, placed_units
from terrazzo.planner.model.shapes import TensorShape, UnitShape
from terrazzo.planner.setup.optimizers import MatrixSpec
from terrazzo.planner.setup.setup import Setup

__all__ = ["MatrixUpdates", "matrix_updates"]


class Exchanged(NamedTuple):
    """What a rank sends along an axis of `size` ranks in the updates of a step, and in how many messages."""

    axis: str
    size: int
    sent_bytes: int
    messages: int


@dataclass(frozen=True)
class MatrixUpdates:
    """All updates of whole matrices in one step.

    Attributes:
        exchanged: what the first rank sends along each axis.
        held_bytes: the most that it holds for them at once, beside all states.
        flops: what the ranks that have most to do compute, one after the other, since all wait for them.
    """

    exchanged: tuple[Exchanged, ...] = ()
    held_bytes: int = 0
    flops: float = 0.0


def matrix_updates(setup: Setup, pp_rank: int) -> MatrixUpdates:
    """The updates of rank `pp_rank` along pp; none under an optimizer that updates none whole, or of a bare number."""
    if setup.optimizer.matrices is None or setup.model.bare:
        return MatrixUpdates()
    return _updates(placed_units(setup, pp_rank), setup.optimizer.matrices)


@once
def _updates(units: tuple[PlacedUnit, ...], spec: MatrixSpec) -> MatrixUpdates:
    sized = [bucket for unit, count, placement in units for bucket in _sized_buckets(unit, count, placement)]
    tally, along = Tally(), dict[str, Traffic]()
    dry_run_matrices(sized, {MATRICES: spec.needs}, tally, lambda axis: along.setdefault(axis, Traffic()))
    sizes = {axis: bucket.coordinate(axis)[1] for bucket in sized for axis in (*bucket.spec.ranks, CUT)}
    exchanged = tuple(
        Exchanged(axis.removeprefix(_DEALT), sizes[axis], traffic.bytes["all_to_all"], traffic.count["all_to_all"])
        for axis, traffic in along.items()
    )
    flops = sum(_slowest(owners, spec.iterations) for owners in owners_of(sized, {MATRICES}))
    return MatrixUpdates(exchanged, tally.ledger.peak_bytes, flops)


def _slowest(owners: Owners, iterations: int) -> float:
    """FLOPs of the rank that has most to compute of what is exchanged at once."""
    loads = Counter[tuple[int, ...]]()
    for matrix, coordinate in owners.coordinates.items():
        loads[tuple(coordinate.values())] += _flops(matrix.shape, iterations)
    return float(max(loads.values(), default=0))


def _flops(shape: tuple[int, int], iterations: int) -> int:
    """FLOPs of Newton-Schulz iterations: two products of the short side's Gram matrix, and its own square."""
    short, long = sorted(shape)
    return iterations * (4 * short**2 * long + 2 * short**3)


# -- buckets of sizes ------------------------------------------------------------------------------------------------

_DEALT = "experts' "
"""What is put before the names of axes over which experts are split: they have other ranks than those of that name."""


class SizedMember(NamedTuple):
    """A `GroupedMember`."""

    group: int
    boxes: tuple[Box, ...] = ()


class SizedSpec(NamedTuple):
    """A `GroupedBucketSpec`."""

    precision: Precision
    updated_off_device: bool
    optim_axes: tuple[str, ...]
    ranks: Mapping[str, GroupedAxis]
    full_numel: int


@dataclass(frozen=True, eq=False)
class SizedBucket:
    """What the first rank has of a bucket: a `GroupedBucket` without tensors."""

    spec: SizedSpec
    tp: int
    layout: Layout
    members: Sequence[SizedMember]

    @classmethod
    def of(cls, bucket: PlannedBucket) -> SizedBucket:
        """The bucket's layout without its tensors."""
        dealt = _DEALT if bucket.dealt > 1 else ""
        ranks = {f"{dealt}{axis}": each for axis, each in bucket.ranks.items()}
        parts = [((str(index),), bucket.part(each)) for index, each in enumerate(bucket.tensors)]
        layout = Layout.of(parts, math.prod(each.size for each in ranks.values()), bucket.align)
        optim_axes = tuple(f"{dealt}{axis}" for axis in bucket.optim_axes)
        return cls(
            SizedSpec(bucket.precision, bucket.updated_off_device, optim_axes, ranks, layout.numel),
            bucket.tp,
            layout,
            [SizedMember(bucket.group_of(each), _boxes(bucket, each)) for each in bucket.tensors],
        )

    @property
    def slots(self) -> Sequence[Slot]:
        return self.layout.slots

    def coordinate(self, axis: str) -> tuple[int, int]:
        return 0, self.spec.ranks[axis].size if axis in self.spec.ranks else self.tp

    def part(self, axes: tuple[str, ...]) -> Range:
        return share(self.layout.whole, [self.coordinate(axis) for axis in axes])


def _sized_buckets(unit: UnitShape, count: int, placement: Placement) -> Iterator[SizedBucket]:
    """The trainable buckets of `count` equal units."""
    made = [SizedBucket.of(bucket) for bucket in buckets(unit, placement) if bucket.trainable]
    for _ in range(count):
        for one in made:
            yield replace(one)


def _boxes(bucket: PlannedBucket, tensor: TensorShape) -> tuple[Box, ...]:
    """The parts of a matrix that ranks along `tp` have; uneven ones all as large as the largest."""
    part = bucket.part(tensor)
    if bucket.group_of(tensor) != MATRICES or len(part) != 2 or part == tensor.shape:
        return ()
    dim = next(dim for dim in (0, 1) if part[dim] != tensor.shape[dim])
    return (Box.cut(tensor.shape, dim, [(0, part[dim])]),) * bucket.tp
