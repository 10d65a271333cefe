"""The buckets of a model that is known by its shapes alone: the engine's own description of each, and its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch

from terrazzo.engine.offload.needs import in_cells
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.layout import Range, padded_bytes, round_up, travels_in_blocks
from terrazzo.planner.memory.placement import Placement
from terrazzo.planner.model.shapes import BlockShape, TensorShape, UnitShape

__all__ = ["PlannedBucket", "buckets", "is_packed"]


@lru_cache(maxsize=8192)
def buckets(unit: UnitShape, placement: Placement) -> tuple[PlannedBucket, ...]:
    """Of one such unit: trainable tensors and frozen ones apart, and experts that ranks share out among them.

    Likewise what tensor-parallel ranks have parts of, and what all of them have whole; what several stages have; what
    is kept in 4 bits; and, where matrices are sent in blocks, what is none.
    """
    groups: dict[tuple[bool, bool, bool, int, bool, bool], list[int]] = {}
    for place, tensor in enumerate(unit.tensors):
        dealt_out = placement.ep > 1 and tensor.role == "expert"
        has_part = (dealt_out and placement.whole_experts) or _is_cut(tensor, unit.block, placement)
        is_shared = placement.padded and placement.tp > 1 and not has_part
        packed = placement.precision.frozen is not None and is_packed(tensor, unit)
        in_blocks = placement.precision.sends_in_blocks(tensor.trainable)
        apart = in_blocks and not travels_in_blocks(tensor.shape)
        key = (not tensor.trainable, is_shared, dealt_out, tensor.copies, packed, apart)
        groups.setdefault(key, []).append(place)
    return tuple(PlannedBucket(unit, groups[key], placement, shared=key[1]) for key in sorted(groups))


def is_packed(tensor: TensorShape, unit: UnitShape) -> bool:
    """Whether it is kept in 4 bits where frozen matrices are: see `packed_members` of the engine."""
    return tensor.in_linear and not tensor.trainable and not unit.is_root and tensor.copies == 1


def _is_cut(tensor: TensorShape, block: BlockShape | None, placement: Placement) -> bool:
    """Whether each tensor-parallel rank has a part of it; of fewer key heads than ranks all have all."""
    if tensor.role == "expert" and placement.whole_experts:
        return False
    if block is not None and block.kv_heads < placement.tp and tensor.of_key_heads:
        return False
    return tensor.split != "none"


class PlannedBucket(BucketSpec):
    """A bucket of the tensors at these places of a unit.

    Attributes:
        places: of its tensors among those of the unit.
        shared: all tensor-parallel ranks have it whole, and their gradients are summed.
        tp: ranks along `tp` that have a part of each, or 1.
        dealt: ranks among which whole tensors are dealt out (experts): so many fewer split each of them.
        padded: as the engine pads; a bare number of parameters is not.
        end: elements of the flat space up to the padding at its end.
        moments: bytes per element of each state that the optimizer keeps for every element; `matrix_moments`: of those
            that it updates as whole matrices.
    """

    def __init__(self, unit: UnitShape, places: Sequence[int], placement: Placement, shared: bool) -> None:
        recipe, precision = placement.optimizer, placement.precision
        self._whole = recipe.matrix_moments is not None
        if self._whole:
            places = sorted(places, key=lambda place: self.group_of(unit.tensors[place]))
        tensors = [unit.tensors[place] for place in places]
        self.places, self.tensors, self.shared, self._fixed_bytes = places, tensors, shared, recipe.fixed_bytes
        self.dealt, self.padded = placement.ep if tensors[0].role == "expert" else 1, placement.padded
        self._whole_experts = placement.whole_experts
        self.tp = 1 if shared or (self.dealt > 1 and placement.whole_experts) else placement.tp
        packed = precision.frozen if precision.frozen is not None and is_packed(tensors[0], unit) else None
        self.align = precision.align() if placement.diloco is None else max(precision.align(), placement.diloco.align)
        align = max(self.align, precision.align(packed)) if self.padded else 1
        self.end = sum(round_up(self.share(tensor), align) for tensor in tensors)
        axes = placement.axes(self.dealt > 1, shared)
        split = math.prod(axis.size for axis in axes.values())
        super().__init__(
            round_up(self.end, align * split) if self.padded else self.end,
            placement.expert_plan if self.dealt > 1 else placement.plan,
            precision,
            axes,
            placement.tiers,
            tensors[0].trainable,
            unit.is_root,
            on_host=placement.host > 0,
            stages=tuple(range(tensors[0].copies)) if tensors[0].copies > 1 else (),
            packed=packed,
            matrices=travels_in_blocks(tensors[0].shape),
            diloco=placement.diloco,
        )
        each = precision.moments.itemsize if recipe.moment_bytes is None else recipe.moment_bytes
        self.moments, self.matrix_moments = [each] * recipe.moments, [each] * (recipe.matrix_moments or 0)
        self._cell = placement.cell

    def group_of(self, tensor: TensorShape) -> int:
        """The param group: 0 of matrices that are updated whole, 1 of others of two dims or more, 2 of the rest."""
        return 0 if self._whole and tensor.is_matrix else 1 if len(tensor.shape) >= 2 else 2

    def shares_memory(self, stored: torch.dtype) -> bool:
        """Of a bare number of parameters as published sums count: a weight beside each master of another dtype."""
        return super().shares_memory(stored) and (self.padded or stored == self.precision.master)

    def share(self, tensor: TensorShape) -> int:
        """Elements of a tensor on a rank, before data ranks divide it; of uneven parts the largest, the last rank's."""
        if tensor.split == "none" or self.tp == 1 or tensor.role == "expert" or not self.padded:
            is_whole = tensor.split == "none" or (tensor.role == "expert" and self._whole_experts)
            return -(-tensor.numel // ((1 if is_whole else self.tp) * self.dealt))
        whole = tensor.shape[-1 if tensor.split in ("row", "row_splits") else 0]
        return tensor.numel // whole * -(-whole // self.tp)

    def part(self, tensor: TensorShape) -> tuple[int, ...]:
        """The shape of a tensor on a rank: of uneven parts the largest."""
        if tensor.role == "expert" and self.dealt > 1:
            return (-(-tensor.shape[0] // self.dealt), *tensor.shape[1:])
        if tensor.split == "none" or self.tp == 1 or tensor.role == "expert":
            return tensor.shape
        cut = len(tensor.shape) - 1 if tensor.split in ("row", "row_splits") else 0
        return tuple(-(-size // self.tp) if dim == cut else size for dim, size in enumerate(tensor.shape))

    @property
    def updated_numel(self) -> int:
        """Elements that the optimizer of the first rank sees: all but the padding at the end of the space."""
        return min(self.end, self.numel(self.optim_axes))

    @cached_property
    def runs(self) -> tuple[int, int, int]:
        """Of these, those of each group: runs of parameters that share settings."""
        ends, held, align = list[int](), 0, self.align
        for group in range(3):
            held += sum(round_up(self.share(each), align) for each in self.tensors if self.group_of(each) == group)
            ends.append(min(self.updated_numel, held))
        return ends[0], ends[1] - ends[0], self.updated_numel - ends[1]

    @property
    def moments_bytes(self) -> float:
        """Of what the optimizer of the first rank keeps for every element."""
        if self.moments_apart:
            return sum(self.kept_apart)
        matrices, *others = self.runs
        return matrices * sum(self.matrix_moments) + sum(others) * sum(self.moments)

    @property
    def matrix_numel(self) -> int:
        """Elements of the first rank that are of matrices which are updated whole."""
        return self.runs[0]

    @property
    def kept_apart(self) -> list[float]:
        """Bytes of each state that the optimizer of the first rank keeps where they are not tensors of its own."""
        return [span.numel * each for span, each in self._spans]

    @property
    def bytes_apart(self) -> list[float]:
        """For each of these, bytes of an element."""
        return [each for _, each in self._spans]

    @cached_property
    def _spans(self) -> list[tuple[Range, float]]:
        """The elements of the first rank that have each state, and bytes of one.

        Away from the device those of matrices that are updated whole have room of their own, on drives in whole cells.
        """
        held, end = Range(0, self.numel(self.optim_axes)), self._matrix_end
        if not (self._whole and self.updated_off_device and self.precision.narrow is None):
            return [(held, each) for each in self.moments]
        others = self.end > end
        matrices = held.intersect(Range(0, end)) if others else held
        rest = Range(matrices.stop, held.stop)
        found = [(matrices, each) for each in self.matrix_moments if end] + [
            (rest, each) for each in self.moments if others
        ]
        return (
            [(in_cells(span, held, self._cell), each) for span, each in found] if self.tiers.optim == "nvme" else found
        )

    @cached_property
    def _matrix_end(self) -> int:
        """Elements of the flat space up to the end of matrices that are updated whole, which come first."""
        return sum(round_up(self.share(each), self.align) for each in self.tensors if self.group_of(each) == 0)

    @cached_property
    def resting(self) -> dict[str, tuple[str, float]]:
        """Tier and bytes of each state on the first rank, which no rank exceeds but by a step count.

        Padding has no moments on the device but in 8 bits; away from it each state has pages of its own.
        """
        found: dict[str, tuple[str, float]] = {}
        for state, tier, nbytes in self.at_rest(self.kept_apart):
            before = found.get(state, (tier, 0))[1]
            found[state] = tier, before + (nbytes if tier == "device" else padded_bytes(nbytes))
        if self.trainable and not self.updated_off_device:
            counts = sum(run > 0 for run in self.runs[1:]) * self._fixed_bytes if self.padded else 0
            found["moments"] = "device", self.moments_bytes + counts
        return found
