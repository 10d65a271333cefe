"""The buckets of a model that is known by its shapes alone: the engine's own description of each, and its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from terrazzo.engine.offload.needs import in_cells
from terrazzo.engine.plan.bucket_bytes import average_at_rest, copied_bytes, pending_bytes, states_at_rest
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.kept_weights import Keep
from terrazzo.engine.plan.layout import Range, padded_bytes, round_up, travels_in_blocks
from terrazzo.engine.plan.moves import GradientFate
from terrazzo.planner.caching import once
from terrazzo.planner.layout.placement import Placement
from terrazzo.planner.model.shapes import TensorShape, UnitShape, parts_along_tp

__all__ = ["MATRICES", "PlannedBucket", "TrainedUnit", "buckets", "is_packed", "trained_unit"]

MATRICES, OTHER_MATRICES, VECTORS = range(3)
"""Param groups, in their order in a bucket: matrices that are updated whole, others of two dims or more, the rest."""


class GroupNumels(NamedTuple):
    """Elements of each param group: a run of parameters that share settings."""

    matrices: int
    other_matrices: int
    vectors: int


class BucketKind(NamedTuple):
    """What the tensors of a bucket have in common; a unit has a bucket for each kind, in this order.

    Attributes:
        frozen: they are not trained.
        shared: all tensor-parallel ranks have them whole, and their gradients are summed.
        dealt: they are of experts that ranks along ep share out among them.
        copies: how many stages have them.
        packed: they are kept in 4 bits.
        apart: they are no matrices, where matrices are sent in blocks.
    """

    frozen: bool
    shared: bool
    dealt: bool
    copies: int
    packed: bool
    apart: bool


@once
def buckets(unit: UnitShape, placement: Placement) -> tuple[PlannedBucket, ...]:
    """The buckets of one such unit, one for each `BucketKind` that it has."""
    groups: dict[BucketKind, list[int]] = {}
    for place, tensor in enumerate(unit.tensors):
        dealt_out = placement.ep > 1 and tensor.role == "expert"
        parts = parts_along_tp(tensor, unit.block, placement.tp, placement.whole_experts)
        has_part = (dealt_out and placement.whole_experts) or parts > 1
        is_shared = placement.padded and placement.tp > 1 and not has_part
        packed = placement.precision.frozen is not None and is_packed(tensor, unit)
        in_blocks = placement.precision.sends_in_blocks(tensor.trainable)
        apart = in_blocks and not travels_in_blocks(tensor.shape)
        kind = BucketKind(not tensor.trainable, is_shared, dealt_out, tensor.copies, packed, apart)
        groups.setdefault(kind, []).append(place)
    keep = Keep.of(unit.is_root, beside_packed=any(kind.packed for kind in groups))
    return tuple(PlannedBucket(unit, groups[kind], placement, kind.shared, keep) for kind in sorted(groups))


def is_packed(tensor: TensorShape, unit: UnitShape) -> bool:
    """Whether it is kept in 4 bits where frozen matrices are: see `packed_members` of the engine."""
    return tensor.in_linear and not tensor.trainable and not unit.is_root and tensor.copies == 1


class RestingState(NamedTuple):
    """Where one state of one rank lies, and its bytes."""

    tier: str
    nbytes: float


class PlannedBucket(BucketSpec):
    """A bucket of the tensors at these places of a unit.

    Args:
        shared: all tensor-parallel ranks have it whole, and their gradients are summed.

    Attributes:
        places: the places of its tensors among those of the unit.
        tp: ranks along `tp` that have a part of each, or 1.
        dealt: ranks among which whole tensors are dealt out (experts): so many fewer split each of them.
        padded: tensors are padded as the engine pads them; a bare number of parameters is not.
        optimizer: the optimizer, which says what is kept.
        averaged: there is an average of its weights.
        end: elements of the flat space up to the padding at its end.
        moments: bytes per element of each state that the optimizer keeps for every element; `matrix_moments`: the same
            for what it updates as whole matrices.
    """

    def __init__(self, unit: UnitShape, places: Sequence[int], placement: Placement, shared: bool, keep: Keep) -> None:
        self.optimizer, precision = placement.optimizer, placement.precision
        if self.optimizer.matrices is not None:
            places = sorted(places, key=lambda place: self.group_of(unit.tensors[place]))
        tensors = [unit.tensors[place] for place in places]
        self.places, self.tensors = places, tensors
        self.dealt, self.padded = placement.ep if tensors[0].role == "expert" else 1, placement.padded
        self._block, self._whole_experts = unit.block, placement.whole_experts
        self.tp = 1 if shared or (self.dealt > 1 and placement.whole_experts) else placement.tp
        packed = precision.frozen if precision.frozen is not None and is_packed(tensors[0], unit) else None
        self.align = precision.align(diloco=placement.diloco)
        align = precision.align(packed, placement.diloco) if self.padded else 1
        self.end = sum(round_up(self.share(tensor), align) for tensor in tensors)
        axes = placement.axes(self.dealt > 1, shared)
        split = math.prod(axis.size for axis in axes.values())
        super().__init__(
            full_numel=round_up(self.end, align * split) if self.padded else self.end,
            plan=placement.expert_plan if self.dealt > 1 else placement.plan,
            precision=precision,
            ranks=axes,
            tiers=placement.tiers,
            trainable=tensors[0].trainable,
            keep=keep,
            on_host=placement.host > 0,
            tied_ranks=tuple(range(tensors[0].copies)) if tensors[0].copies > 1 else (),
            packed=packed,
            in_blocks=travels_in_blocks(tensors[0].shape),
            diloco=placement.diloco,
        )
        each = self.optimizer.bytes_each(precision)
        self.moments = [each] * self.optimizer.moments
        self.matrix_moments = [] if self.optimizer.matrices is None else [each] * self.optimizer.matrices.moments
        self.averaged = placement.ema and self.trainable
        self._cell = placement.cell

    def group_of(self, tensor: TensorShape) -> int:
        """The param group of a tensor."""
        if self.optimizer.matrices is not None and tensor.is_matrix:
            return MATRICES
        return OTHER_MATRICES if len(tensor.shape) >= 2 or not self.optimizer.decays else VECTORS

    @property
    def shares_memory(self) -> bool:
        """Whether weights are a view of master weights. A bare number of parameters is counted as published sums are: a
        weight beside each master weight of another dtype.
        """
        return super().shares_memory and (self.padded or self.own_dtype == self.precision.master)

    def share(self, tensor: TensorShape) -> int:
        """Elements of a tensor on a rank, before data ranks divide it; of uneven parts the largest, the last rank's."""
        if not self.padded:
            parts = parts_along_tp(tensor, self._block, self.tp, self._whole_experts)
            return -(-tensor.numel // (parts * self.dealt))
        return math.prod(self.part(tensor))

    def part(self, tensor: TensorShape) -> tuple[int, ...]:
        """The shape of a tensor on a rank: of uneven parts the largest."""
        part = list(tensor.shape)
        part[0] = -(-part[0] // self.dealt)
        if (parts := parts_along_tp(tensor, self._block, self.tp, self._whole_experts)) > 1:
            in_stack = self._block is not None and tensor.role == "expert" and tensor.shape[0] == self._block.experts
            cut = -1 if tensor.split in ("row", "row_splits") else int(in_stack)
            part[cut] = -(-part[cut] // parts)
        return tuple(part)

    @property
    def updated_numel(self) -> int:
        """Elements that the optimizer of the first rank sees: all but the padding at the end of the space."""
        return min(self.end, self.numel(self.optim_axes))

    @cached_property
    def runs(self) -> GroupNumels:
        """How many of these elements each param group has."""
        updated, matrices = self.updated_numel, min(self.updated_numel, self._end_of(MATRICES))
        both = min(updated, self._end_of(OTHER_MATRICES))
        return GroupNumels(matrices, both - matrices, updated - both)

    def _end_of(self, group: int) -> int:
        """Elements of the flat space up to the end of a param group."""
        return sum(round_up(self.share(each), self.align) for each in self.tensors if self.group_of(each) <= group)

    @property
    def moments_bytes(self) -> float:
        """Bytes that the optimizer of the first rank keeps for its elements."""
        if self.moments_apart:
            return sum(self.apart_moments)
        matrices, *others = self.runs
        return matrices * sum(self.matrix_moments) + sum(others) * sum(self.moments)

    @property
    def matrix_wire_bytes(self) -> int:
        """Bytes that the first rank exchanges of matrices that are updated whole."""
        return (
            0 if self.optimizer.matrices is None else self.runs.matrices * self.optimizer.matrices.needs.wire.itemsize
        )

    @property
    def apart_moments(self) -> list[float]:
        """Bytes of each state that the optimizer of the first rank keeps where they are not tensors of its own."""
        return [span.numel * each for span, each in self._spans]

    @property
    def apart_moment_bytes(self) -> list[float]:
        """Bytes of an element of each of these states."""
        return [each for _, each in self._spans]

    @cached_property
    def _spans(self) -> list[tuple[Range, float]]:
        """The elements of the first rank that have each state, and bytes of one.

        Away from the device those of matrices that are updated whole have room of their own, on drives in whole cells.
        """
        owned = Range(0, self.numel(self.optim_axes))
        if not (self.optimizer.matrices is not None and self.updated_off_device and self.precision.narrow is None):
            return [(owned, each) for each in self.moments]
        end = self._end_of(MATRICES)
        has_others = self.end > end
        matrices = owned.intersect(Range(0, end)) if has_others else owned
        rest = Range(matrices.stop, owned.stop)
        spans = [(matrices, each) for each in self.matrix_moments if end]
        spans += [(rest, each) for each in self.moments if has_others]
        if self.tiers.optim == "nvme":
            return [(in_cells(span, owned, self._cell), each) for span, each in spans]
        return spans

    @cached_property
    def resting(self) -> dict[str, RestingState]:
        """Each state of the first rank, whose bytes no rank exceeds but by a step count.

        Padding has no moments on the device but in 8 bits; away from it each state has pages of its own.
        """
        resting: dict[str, RestingState] = {}
        for state, tier, nbytes in states_at_rest(self, self.apart_moments):
            before = resting[state].nbytes if state in resting else 0
            resting[state] = RestingState(tier, before + (nbytes if tier == "device" else padded_bytes(nbytes)))
        if self.trainable and not self.updated_off_device:
            _, *elementwise = self.runs
            counts = sum(run > 0 for run in elementwise) * self.optimizer.fixed_bytes if self.padded else 0
            resting["moments"] = RestingState("device", self.moments_bytes + counts)
        if self.averaged:
            _, tier, nbytes = average_at_rest(self)
            resting["average"] = RestingState(tier, nbytes)
        return resting


@dataclass(frozen=True)
class TrainedUnit:
    """What one rank trains of one unit.

    Attributes:
        largest_grad: bytes of the gradient of a single parameter, as autograd makes it.
        optim_numel: trainable elements that this rank updates.
        copied: bytes of gradients that come from other stages which have the same parameters.
    """

    largest_grad: int
    optim_numel: int
    copied: int


@once
def trained_unit(unit: UnitShape, placement: Placement) -> TrainedUnit:
    """What the first rank trains of one such unit."""
    trained = [bucket for bucket in buckets(unit, placement) if bucket.trainable]
    largest = max((bucket.share(tensor) for bucket in trained for tensor in bucket.tensors), default=0)
    return TrainedUnit(
        largest_grad=largest * placement.precision.compute.itemsize,
        optim_numel=sum(bucket.numel(bucket.optim_axes) for bucket in trained),
        copied=sum(copied_bytes(bucket, pending_bytes(bucket, GradientFate.LOCAL)) for bucket in trained),
    )
