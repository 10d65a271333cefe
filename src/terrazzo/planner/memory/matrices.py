"""Updates of whole matrices, planned: what the first rank of each axis sends and holds for them, and what they compute.

Which rank owns which matrix, what goes where and what is held on the way is the engine's own code, which is asked with
buckets that have sizes in place of tensors (`terrazzo.engine.optim.matrix_owners` and `matrix_steps`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from terrazzo.engine.comm.tally import Tally
from terrazzo.engine.comm.traffic import Traffic
from terrazzo.engine.optim.matrix_owners import CUT, Owners, owners_of
from terrazzo.engine.optim.matrix_steps import dry_run_matrices
from terrazzo.engine.optim.template import MatrixNeeds, Template
from terrazzo.engine.plan.box import Box
from terrazzo.engine.plan.layout import Layout, Range, share
from terrazzo.optim import Muon
from terrazzo.planner.memory.buckets import PlannedBucket, buckets
from terrazzo.planner.memory.placement import PlacedUnit, placed_units
from terrazzo.planner.model.shapes import TensorShape
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
    """Of a step.

    Attributes:
        exchanged: by the first rank, along each axis.
        held_bytes: by it, at the most, beside all states.
        flops: one after the other of those that have most to do, as all wait for them.
    """

    exchanged: tuple[Exchanged, ...] = ()
    held_bytes: int = 0
    flops: float = 0.0


def matrix_updates(setup: Setup, stage: int) -> MatrixUpdates:
    """Of a rank of `stage`; nothing of an optimizer that updates none whole, nor of a bare number of parameters."""
    if setup.optimizer.matrix_moments is None or setup.model.bare:
        return MatrixUpdates()
    return _updates(placed_units(setup, stage), setup.optimizer.iterations)


@lru_cache(maxsize=512)
def _updates(units: tuple[PlacedUnit, ...], iterations: int) -> MatrixUpdates:
    found: Any = [bucket for unit, count, placement in units for bucket in _sized_buckets(unit, count, placement)]
    template, tally, along = Template(), Tally(), dict[str, Traffic]()
    template.matrices = MatrixNeeds(Muon.wire, Muon.workspace_bytes)
    dry_run_matrices(found, [template], tally, lambda axis: along.setdefault(axis, Traffic()))
    sizes = {axis: bucket.sharding.axes.along(axis).size for bucket in found for axis in (*bucket.sharding.ranks, CUT)}
    exchanged = tuple(
        Exchanged(axis.removeprefix(_DEALT), sizes[axis], traffic.bytes["all_to_all"], traffic.count["all_to_all"])
        for axis, traffic in along.items()
    )
    flops = sum(_slowest(owners, iterations) for owners in owners_of(found, {0}))
    return MatrixUpdates(exchanged, tally.ledger.peak_bytes, flops)


def _slowest(owners: Owners, iterations: int) -> float:
    """FLOPs of the rank that has most to compute of what is exchanged at once."""
    loads = Counter[tuple[int, ...]]()
    for matrix, coordinate in owners.coordinates.items():
        loads[tuple(coordinate.values())] += _flops(matrix.shape, iterations)
    return float(max(loads.values(), default=0))


def _flops(shape: tuple[int, int], iterations: int) -> int:
    """Of Newton-Schulz iterations: two products of the short side's Gram matrix, and its own square."""
    short, long = sorted(shape)
    return iterations * (4 * short**2 * long + 2 * short**3)


# -- buckets of sizes ------------------------------------------------------------------------------------------------

_DEALT = "experts' "
"""Of the axes over which experts are split, which are others than those of the same name."""


class _Along(NamedTuple):
    size: int
    rank: int = 0


class _Member(NamedTuple):
    group: int
    boxes: tuple[Box, ...] = ()


class _Axes:
    """Of the first rank."""

    device = torch.device("meta")

    def __init__(self, ranks: Mapping[str, _Along], tp: int) -> None:
        self.ranks, self._tp = ranks, _Along(tp)

    def along(self, axis: str) -> _Along:
        return self.ranks.get(axis, self._tp)

    def cuts(self, axes: Sequence[str]) -> list[tuple[int, int]]:
        return [(self.ranks[axis].rank, self.ranks[axis].size) for axis in axes]


@dataclass(frozen=True)
class _Space:
    layout: Layout
    axes: _Axes

    def range(self, axes: Sequence[str]) -> Range:
        return share(self.layout.whole, self.axes.cuts(axes))


@dataclass(frozen=True)
class _Sharding:
    axes: _Axes

    @property
    def ranks(self) -> Mapping[str, _Along]:
        return self.axes.ranks


@dataclass(frozen=True, eq=False)
class _SizedBucket:
    """What the engine asks of a `Bucket` for updates of matrices."""

    precision: Any
    updated_off_device: bool
    optim_axes: tuple[str, ...]
    sharding: _Sharding
    space: _Space
    members: Sequence[_Member]

    @property
    def slots(self) -> Sequence[Any]:
        return self.space.layout.slots


def _sized_buckets(unit: Any, count: int, placement: Any) -> Iterator[_SizedBucket]:
    """Of so many equal units."""
    trained = [bucket for bucket in buckets(unit, placement) if bucket.trainable]
    made = [_sized(bucket) for bucket in trained]
    for _ in range(count):
        for one in made:
            yield replace(one)


def _boxes(bucket: PlannedBucket, tensor: TensorShape) -> tuple[Box, ...]:
    """The parts of a matrix that ranks along `tp` have; uneven ones all as large as the largest."""
    part = bucket.part(tensor)
    if bucket.group_of(tensor) or len(part) != 2 or part == tensor.shape:
        return ()
    dim = next(dim for dim in (0, 1) if part[dim] != tensor.shape[dim])
    return (Box.cut(tensor.shape, dim, [(0, part[dim])]),) * bucket.tp


def _sized(bucket: PlannedBucket) -> _SizedBucket:
    dealt = _DEALT if bucket.dealt > 1 else ""
    axes = _Axes({f"{dealt}{axis}": _Along(each.size) for axis, each in bucket.ranks.items()}, bucket.tp)
    split = math.prod(each.size for each in axes.ranks.values())
    parts = [((str(index),), bucket.part(each)) for index, each in enumerate(bucket.tensors)]
    layout = Layout(parts, split, bucket.align)
    members = [_Member(bucket.group_of(each), _boxes(bucket, each)) for each in bucket.tensors]
    split_over = tuple(f"{dealt}{axis}" for axis in bucket.optim_axes)
    away = bucket.updated_off_device
    return _SizedBucket(bucket.precision, away, split_over, _Sharding(axes), _Space(layout, axes), members)
