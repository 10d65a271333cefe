"""What every unit of a model follows: the mesh, the plan and the precision; and the tiers of one unit's states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from terrazzo.engine.axes import Axes
from terrazzo.engine.place import Plan
from terrazzo.engine.precision import Precision

__all__ = ["Recipe", "Tiers"]


class Tiers(NamedTuple):
    """Where the states of one unit rest: `device`, `cpu` or `nvme` each."""

    weight: str = "device"
    grad: str = "device"
    optim: str = "device"


@dataclass(frozen=True)
class Recipe:
    """What every bucket of a model follows. `plan`'s places hold only axes with more than one rank."""

    axes: Axes
    plan: Plan
    precision: Precision

    def tiers(self, index: int, units: int) -> Tiers:
        """Those of one unit.

        Args:
            index: in the order of registration, root first.
            units: how many there are.
        """
        return Tiers(*(place.tier_of(index, units) for place in (self.plan.weight, self.plan.grad, self.plan.optim)))
