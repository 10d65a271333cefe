"""A bucket before anything is allocated: its parameters, where each lies in its flat space, and its description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from terrazzo.engine.buckets.resting.buffer import Space
from terrazzo.engine.buckets.resting.counted_once import CountedOnce
from terrazzo.engine.formats.format_names import FrozenFormat
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.mesh.family import Family
from terrazzo.engine.partition.box import Box
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.kept_weights import Keep
from terrazzo.engine.plan.layout import Layout, Range, Slot, travels_in_blocks
from terrazzo.engine.plan.place import Tiers
from terrazzo.engine.plan.sharding_spec import ShardingSpec

__all__ = ["BucketLayout"]


@dataclass(eq=False)
class BucketLayout:
    """Parameters of one unit that share a flat index space. They are told apart by identity.

    Attributes:
        members: the parameters, in the order of the space.
        spec: the description, which says what states there are.
        space: the flat space, over the ranks of the mesh.
    """

    members: Sequence[Member]
    spec: BucketSpec
    space: Space

    @classmethod
    def of(
        cls,
        members: Sequence[Member],
        sharding: ShardingSpec,
        keep: Keep,
        tiers: Tiers,
        packed: FrozenFormat | None,
    ) -> BucketLayout:
        """Lay out `members`, in their order.

        Args:
            keep, tiers, packed: as for `BucketSpec`.
        """
        axes, first = sharding.axes, members[0].parameter
        align = sharding.precision.align(packed, sharding.diloco)
        layout = Layout.of([(m.names, tuple(m.parameter.shape)) for m in members], axes.size(sharding.ranks), align)
        spec = BucketSpec(
            full_numel=layout.numel,
            plan=sharding.plan,
            precision=sharding.precision,
            ranks=sharding.ranks,
            tiers=tiers,
            trainable=members[0].trainable,
            keep=keep,
            stored=None if first.dtype.is_floating_point else first.dtype,
            on_host=axes.device.type == "cpu",
            tied_ranks=members[0].tied_ranks,
            packed=packed,
            in_blocks=first.dtype.is_floating_point and travels_in_blocks(members[0].shape),
            diloco=sharding.diloco,
        )
        return cls(members, spec, Space(layout, axes))

    @cached_property
    def counted(self) -> CountedOnce:
        """Of elements that several ranks have, which copy counts."""
        return CountedOnce(self.space, self.spec)

    @property
    def axes(self) -> Axes:
        """The axes of the mesh."""
        return self.space.axes

    @property
    def family(self) -> Family:
        """The family of its parameters, which says over which axes their gradients are summed."""
        return self.members[0].family

    @property
    def slots(self) -> Sequence[Slot]:
        return self.space.layout.slots

    def coordinate(self, axis: str) -> tuple[int, int]:
        """This rank's index along an axis, and how many there are."""
        along = self.axes.along(axis)
        return along.rank, along.size

    def part(self, axes: tuple[str, ...]) -> Range:
        """This rank's part of the flat space when it is split over `axes`."""
        return self.space.range(axes)

    @cached_property
    def _boxes(self) -> dict[str, Box]:
        return {member.name: member.box for member in self.members}

    def box(self, slot: Slot) -> Box:
        """This rank's part of the parameter in a slot."""
        return self._boxes[slot.name]
