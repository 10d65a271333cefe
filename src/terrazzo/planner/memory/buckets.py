"""The buckets of a model that is known by its shapes alone: the engine's own description of each, and its tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch

from terrazzo.engine.plan.layout import ALIGN, padded_bytes, round_up
from terrazzo.engine.plan.spec import BucketSpec
from terrazzo.planner.memory.placement import Placement
from terrazzo.planner.model.shapes import BlockShape, TensorShape, UnitShape

__all__ = ["PlannedBucket", "buckets"]


@lru_cache(maxsize=8192)
def buckets(unit: UnitShape, placement: Placement) -> tuple[PlannedBucket, ...]:
    """Of one such unit: trainable tensors and frozen ones apart, and experts that ranks share out among them.

    Likewise what tensor-parallel ranks have parts of, and what all of them have whole; and what several stages have.
    """
    groups: dict[tuple[bool, bool, bool, int], list[TensorShape]] = {}
    for tensor in unit.tensors:
        dealt_out = placement.ep > 1 and tensor.role == "expert"
        has_part = (dealt_out and placement.whole_experts) or _is_cut(tensor, unit.block, placement)
        is_shared = placement.padded and placement.tp > 1 and not has_part
        groups.setdefault((not tensor.trainable, is_shared, dealt_out, tensor.copies), []).append(tensor)
    return tuple(PlannedBucket(groups[key], placement, unit.is_root, shared=key[1]) for key in sorted(groups))


def _is_cut(tensor: TensorShape, block: BlockShape | None, placement: Placement) -> bool:
    """Whether each tensor-parallel rank has a part of it; of fewer key heads than ranks all have all."""
    if block is not None and block.kv_heads < placement.tp and _KEYS.search(tensor.name):
        return False
    return tensor.split != "none"


_KEYS = re.compile(r"\b(key|value|k_proj|v_proj)\.(weight|bias)$")


class PlannedBucket(BucketSpec):
    """A bucket of these tensors.

    Attributes:
        shared: all tensor-parallel ranks have it whole, and their gradients are summed.
        dealt: ranks among which whole tensors are dealt out (experts): so many fewer split each of them.
        padded: as the engine pads; a bare number of parameters is not.
        end: elements of the flat space up to the padding at its end.
        moments: bytes per element of each state that the optimizer keeps for every element.
    """

    def __init__(self, tensors: Sequence[TensorShape], placement: Placement, keep: bool, shared: bool) -> None:
        recipe, precision = placement.optimizer, placement.precision
        self.tensors, self.shared, self._fixed_bytes = tensors, shared, recipe.fixed_bytes
        self.dealt, self.padded = placement.ep if tensors[0].role == "expert" else 1, placement.padded
        self._tp = 1 if shared or (self.dealt > 1 and placement.whole_experts) else placement.tp
        self.end = sum(round_up(self.share(tensor), ALIGN if self.padded else 1) for tensor in tensors)
        axes = placement.axes(self.dealt > 1, shared)
        split = math.prod(axis.size for axis in axes.values())
        super().__init__(
            round_up(self.end, ALIGN * split) if self.padded else self.end,
            placement.expert_plan if self.dealt > 1 else placement.plan,
            precision,
            axes,
            placement.tiers,
            tensors[0].trainable,
            keep,
            on_host=placement.host > 0,
            stages=tuple(range(tensors[0].copies)) if tensors[0].copies > 1 else (),
        )
        each = precision.moments.itemsize if recipe.moment_bytes is None else recipe.moment_bytes
        self.moments = [each] * recipe.moments

    def shares_memory(self, stored: torch.dtype) -> bool:
        """Of a bare number of parameters as published sums count: a weight beside each master of another dtype."""
        return super().shares_memory(stored) and (self.padded or stored == self.precision.master)

    def share(self, tensor: TensorShape) -> int:
        """Elements of a tensor on a rank, before data ranks divide it; of uneven parts the largest, the last rank's."""
        if tensor.split == "none" or self._tp == 1 or tensor.role == "expert" or not self.padded:
            return -(-tensor.numel // ((self._tp if tensor.split != "none" else 1) * self.dealt))
        whole = tensor.shape[-1 if tensor.split in ("row", "row_splits") else 0]
        return tensor.numel // whole * -(-whole // self._tp)

    @property
    def updated_numel(self) -> int:
        """Elements that the optimizer of the first rank sees: all but the padding at the end of the space."""
        return min(self.end, self.numel(self.optim_axes))

    @property
    def runs(self) -> tuple[int, int]:
        """Of these, matrices and the rest: runs of parameters that share settings."""
        padded = sum(round_up(self.share(tensor), ALIGN) for tensor in self.tensors if len(tensor.shape) >= 2)
        matrices = min(self.updated_numel, padded)
        return matrices, self.updated_numel - matrices

    @cached_property
    def resting(self) -> dict[str, tuple[str, float]]:
        """Tier and bytes of each state on the first rank, which no rank exceeds but by a step count.

        Padding has no moments on the device; away from it each state has pages of its own.
        """
        found: dict[str, tuple[str, float]] = {}
        for state, tier, nbytes in self.at_rest(self.moments):
            before = found.get(state, (tier, 0))[1]
            found[state] = tier, before + (nbytes if tier == "device" else padded_bytes(nbytes))
        if self.trainable and not self.updated_off_device:
            counts = sum(run > 0 for run in self.runs) * self._fixed_bytes if self.padded else 0
            found["moments"] = "device", self.updated_numel * sum(self.moments) + counts
        return found
