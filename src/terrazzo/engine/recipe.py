"""What every unit of a model follows, from `tz.shard` on: the mesh, the plan and the precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from terrazzo.engine.axes import Axes
from terrazzo.engine.family import Family
from terrazzo.engine.links.collectives import Collectives
from terrazzo.engine.place import Plan
from terrazzo.engine.precision import Precision

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """What every bucket of a model follows; what changes while the model trains is in its `Progress` and its `Tally`.

    Attributes:
        axes: of the mesh, and over which gradients are summed.
        plan: its places hold only axes with more than one rank.
    """

    axes: Axes
    plan: Plan
    precision: Precision

    @cached_property
    def ranks(self) -> Mapping[str, Collectives]:
        """The axes with more than one rank over which gradients are summed, data axes first."""
        return {axis: self.axes.along(axis) for axis in self.axes.live(self.axes.names)}

    def of(self, family: Family) -> Recipe:
        """The same for parameters of that family."""
        return replace(self, axes=self.axes.with_sums_over(family.axes)) if family.axes else self
