"""Elements of which several ranks have copies, and which copy counts: in sums of gradients, in norms, in checkpoints.

ranks                                          have the same               the copy that counts
along `tp`, of a parameter that they compute   gradient, before any sum    the first one's: `gives_gradient`
along the axes that `optim` is not split over  states, finished gradient   each one's of a part: `in_sums`, `saved`
of stages that share tied parameters           all of these                the first stage's: `here`
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.engine.buckets.resting.buffer import Space
from terrazzo.engine.mesh.family import seeing_same_data
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.error_feedback import ResidualSpec
from terrazzo.engine.plan.layout import Range
from terrazzo.engine.plan.sharding_spec import ShardingSpec

__all__ = ["NOTHING", "CountedOnce", "sums_over"]

NOTHING = Range(0, 0)
"""Elements of a rank none of whose copies counts."""


def sums_over(sharding: ShardingSpec) -> tuple[str, ...]:
    """The axes whose ranks add up what each has of `CountedOnce.in_sums`, of buckets of all families.

    Along the others ranks have the same sums. Where families are split over other groups of ranks, there are none.
    """
    axes = sharding.axes
    return axes.within_stage if axes.has_experts else (*sharding.plan.optim.axes, *axes.same_data)


@dataclass(frozen=True)
class CountedOnce:
    """The copies of one bucket that this rank has, and those of them that count."""

    space: Space
    spec: BucketSpec

    @property
    def here(self) -> bool:
        """Whether this rank's copy stands for those of all stages that share the bucket: the first of them has it."""
        return not self.spec.tied_ranks or self.space.axes.pp_rank == self.spec.tied_ranks[0]

    def gives_gradient(self, member: Member) -> bool:
        """Whether what this rank computes of a parameter's gradient goes into the sum: else it gives zeros."""
        return not member.replicated or self.space.axes.is_first(seeing_same_data(self.spec.ranks))

    @property
    def in_sums(self) -> Range:
        """Elements of the finished gradient that this rank gives to sums over the axes of `sums_over`."""
        rest = self.spec.ranks if self.space.axes.has_experts else seeing_same_data(self.spec.ranks)
        split = self.spec.optim_axes
        return self.space.range((*split, *(axis for axis in rest if axis not in split)))

    def saved(self, split: tuple[str, ...], apart: tuple[str, ...] = ()) -> Range:
        """Elements of a state that this rank saves: ranks that have the same save a part each.

        Args:
            split, apart: as for `BucketSpec.copied_along`.
        """
        return self.space.range((*split, *self.spec.copied_along(split, apart))) if self.here else NOTHING

    def residual_number(self, residual: ResidualSpec, member: Member) -> tuple[int, int] | None:
        """Number of this rank among those that have a residual of their own of a parameter, and how many these are.

        None where its gradient does not count: zeros lose nothing.
        """
        if not self.gives_gradient(member):
            return None
        alike = seeing_same_data(self.spec.ranks) if member.replicated else ()
        apart = [axis for axis in residual.apart if axis not in alike]
        number = 0
        for rank, size in self.space.axes.coordinates(apart):
            number = number * size + rank
        return number, self.space.axes.size(apart)
