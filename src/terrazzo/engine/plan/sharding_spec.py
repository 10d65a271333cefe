"""Mesh, plan and precision that every unit of a model follows, from `tz.shard` on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.mesh.family import Family
from terrazzo.engine.plan.diloco import DiLoCo
from terrazzo.engine.plan.moves import GradientFate
from terrazzo.engine.plan.place import Plan
from terrazzo.engine.plan.precision import Precision
from terrazzo.errors import BadInput

__all__ = ["ShardingSpec"]


@dataclass(frozen=True)
class ShardingSpec:
    """Settings that every bucket of a model follows. What changes in training is in its `Progress` and its `Tally`.

    Attributes:
        axes: of the mesh.
        mesh_plan: the plan in the data axes of the mesh, whichever the family.
        family: of the parameters, which says over which axes their gradients are summed.
        diloco: how replicas train by themselves; None: gradients are summed over them.
    """

    axes: Axes
    mesh_plan: Plan
    precision: Precision
    family: Family = Family.DENSE
    diloco: DiLoCo | None = None

    @cached_property
    def plan(self) -> Plan:
        """The plan in axes with more than one rank over which gradients of the family are summed."""
        return self._over(self.family).regathered_as(self._over(Family.DENSE))

    def _over(self, family: Family) -> Plan:
        return self.mesh_plan.along(family.renamed).over(self.axes.live(self.axes.summed_over(family)))

    def fate_of(self, last: bool, local: bool | None = None) -> GradientFate:
        """Fate of the gradients of a step's last micro-batch, or of another; see `tz.accumulate` for `local`.

        Default by plan: where `grad` is not split, sums stay local, which sends fewer bytes; where it is split, each
        micro-batch is reduced, which keeps less memory.

        Raises:
            BadInput: `local=False` under a plan that keeps whole gradients.
        """
        if last:
            return GradientFate.FINISHED
        if local is False and not self.mesh_plan.grad.axes:
            raise BadInput(
                f"tz.accumulate(local=False) asks to reduce each micro-batch, but plan {self.mesh_plan.name} keeps "
                "whole gradients on every rank. Leave 'local' out, or use zero2."
            )
        return GradientFate.LOCAL if local or not self.plan.grad.axes else GradientFate.REDUCED

    @cached_property
    def ranks(self) -> Mapping[str, Collectives]:
        """The axes with more than one rank over which gradients are summed, data axes first."""
        return {axis: self.axes.along(axis) for axis in self.axes.live(self.axes.summed_over(self.family))}

    def of(self, family: Family) -> ShardingSpec:
        """Return the same settings for parameters of that family."""
        return self if family is self.family else replace(self, family=family)
