"""What every unit of a model follows: the mesh, the plan and the precision; and where it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from terrazzo.engine.axes import Axes
from terrazzo.engine.links.collectives import Collectives
from terrazzo.engine.place import Plan
from terrazzo.engine.precision import Precision
from terrazzo.engine.scaler import Denominator
from terrazzo.engine.tally import Tally

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """What every bucket of a model follows.

    Attributes:
        plan: its places hold only axes with more than one rank.
        tally: what is counted on the way.
    """

    axes: Axes
    plan: Plan
    precision: Precision
    tally: Tally

    @cached_property
    def ranks(self) -> Mapping[str, Collectives]:
        """The data axes with more than one rank, innermost first."""
        return {axis: self.axes.along(axis) for axis in self.axes.live(self.axes.names)}

    @cached_property
    def denominator(self) -> Denominator:
        """Of finished gradient sums, as this rank was told; knows the loss scaler, if there is one."""
        return Denominator(self.axes.size())
