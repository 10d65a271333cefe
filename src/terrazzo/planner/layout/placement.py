"""Which ranks split each state of a setup, and which tier each unit's states lie on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from terrazzo.engine import DiLoCo, Place, Plan, Precision
from terrazzo.engine.comm.host.columns import MANY_FAR, ROUNDS
from terrazzo.engine.comm.host.gloo import NEAR_BLOCK_BYTES
from terrazzo.engine.mesh.family import REPLICA_AXIS
from terrazzo.engine.plan.place import ON_DEVICE, Tiers
from terrazzo.planner.caching import hashed_once, once, once_per_setup
from terrazzo.planner.layout.stages import Cut, cut_of, units_of_pp_rank, units_on
from terrazzo.planner.machine.mesh import Mesh, RankGroup, group_of
from terrazzo.planner.model.shapes import UnitShape
from terrazzo.planner.setup.optimizers import OptimizerSpec
from terrazzo.planner.setup.setup import Setup

__all__ = ["PlacedUnit", "Placement", "PlannedAxis", "placed_units", "placement_of", "stand_ins"]


@hashed_once
@dataclass(frozen=True)
class Placement:
    """What decides the bytes of every unit under one setup.

    Attributes:
        plan: its places hold only data axes that have more than one rank.
        groups: of these, innermost first. `expert_plan`, `expert_groups`: the same for experts that ranks along ep
            share, of which the innermost ranks have others each: those of tp first, but in Megatron-core.
        tiers: where the unit's states rest.
        padded: tensors are padded as the engine pads them; a bare number of parameters is not, and its weights and
            master weights stay apart.
        host: ranks of one CPU host, which receive gradients in memory beside the sum; 0 on CUDA.
        cell: elements of states on drives that are handled at once.
        whole_experts, diloco, ema: as of `Setup`.
    """

    plan: Plan
    groups: tuple[RankGroup, ...]
    tiers: Tiers
    precision: Precision
    optimizer: OptimizerSpec
    tp_group: RankGroup
    ep: int
    padded: bool
    host: int
    cell: int
    whole_experts: bool
    expert_plan: Plan
    expert_groups: tuple[RankGroup, ...]
    diloco: DiLoCo | None
    ema: bool

    @property
    def tp(self) -> int:
        """Ranks along tp."""
        return self.tp_group.size

    def ranks(self, axes: Collection[str]) -> int:
        """How many ranks these data axes have together."""
        return math.prod(group.size for group in self.groups if group.axis in axes)

    def axes(self, dealt: bool = False, shared: bool = False) -> Mapping[str, PlannedAxis]:
        """The axes of `groups`, as they split a tensor.

        Args:
            dealt: the tensor is one of experts that ranks along ep share.
            shared: gradients are summed along `tp` too, whose ranks have the same tensor.
        """
        groups = self.expert_groups if dealt else self.groups
        groups += (self.tp_group,) if shared else ()
        return {group.axis: PlannedAxis.of(group, self.host) for group in groups}


@dataclass(frozen=True)
class PlannedAxis:
    """What collectives along an axis do to memory.

    Attributes:
        size: its ranks.
        near: its ranks on the CPU host that has fewest; 0 on CUDA, where NCCL sums as it receives.
        even: each host has as many of them.
    """

    size: int
    near: int
    even: bool = True

    @classmethod
    def of(cls, group: RankGroup, host: int) -> PlannedAxis:
        """The axis of a group on CPU hosts of so many ranks; 0 on CUDA."""
        if not host:
            return cls(group.size, 0)
        counts = group.on_hosts(host)
        return cls(group.size, counts.fewest, counts.fewest == counts.most)

    @property
    def all_reduce_steps(self) -> int:
        """Collectives that an all-reduce is made of, one after the other: on a CPU a reduce-scatter and a gather."""
        return 2 if self.near else 1

    def receive_bytes(self, full_bytes: int) -> int:
        """Bytes that arrive from the other ranks to be summed.

        On a CPU, ranks of one host are read block by block, and many on other hosts in rounds; see `GlooCollectives`.
        """
        size, near, chunk = self.size, self.near, full_bytes // self.size
        if not near:
            return 0
        together = 0
        if size - near > MANY_FAR:
            near = near if self.even else 1
            together = min(ROUNDS, size // near - 1) * near if near > 1 else 0
        return (near - 1) * min(chunk, NEAR_BLOCK_BYTES) + (size - near + together) * chunk


@once_per_setup
def placement_of(setup: Setup, tiers: Tiers) -> Placement:
    """The placement of a setup, its plan's places resolved to the data axes that have more than one rank.

    Args:
        tiers: where states of the unit rest for which it is asked; see `placed_units`.
    """
    mesh, apart = setup.mesh, REPLICA_AXIS if setup.diloco is not None else ""  # then the axes of one replica
    groups = tuple(group_of(mesh, axis) for axis in mesh.sizes() if axis != apart)
    experts = tuple(group for group in _dealt(mesh, setup.whole_experts) if group.axis != apart)
    plan = _among(setup.plan, [group.axis for group in groups])
    placement = Placement(
        plan=plan,
        groups=groups,
        tiers=tiers,
        precision=setup.precision,
        optimizer=setup.optimizer,
        tp_group=group_of(mesh, "tp"),
        ep=mesh.ep,
        padded=not setup.model.bare,
        host=setup.cluster.device.per_node if setup.cluster.device.kind == "cpu" else 0,
        cell=setup.offload.cell_numel,
        whole_experts=setup.whole_experts,
        expert_plan=_among(setup.plan, [group.axis for group in experts]).regathered_as(plan),
        expert_groups=experts,
        diloco=setup.diloco,
        ema=setup.ema,
    )
    return _one_for_all(placement)


@once
def _one_for_all(placement: Placement) -> Placement:
    """The first placement that equals this one: what is kept by it is found without a comparison of fields."""
    return placement


def _among(plan: Plan, axes: Container[str]) -> Plan:
    """The plan with only these of its axes, all states on the device."""
    weight, between, grad, optim = (
        Place(place.among(axes)) for place in (plan.weight, plan.between, plan.grad, plan.optim)
    )
    return Plan(weight, between, grad, optim)


def _dealt(mesh: Mesh, whole_experts: bool) -> Iterator[RankGroup]:
    """What is left of the data axes to ranks with the same experts, innermost first."""
    left, dealt = mesh.ep, 1 if whole_experts else mesh.tp
    data = {"dp_shard": mesh.shard_ranks * (mesh.tp if whole_experts else 1), "dp_replicate": mesh.dp_replicate}
    for axis, size in data.items():
        taken = math.gcd(size, left)
        left, dealt, size = left // taken, dealt * taken, size // taken
        if size > 1:
            yield RankGroup(axis, size, dealt, mesh.world_size)
        dealt *= size


class PlacedUnit(NamedTuple):
    """Equal units in a row, `number` of them, whose states lie on the same tiers."""

    unit: UnitShape
    number: int
    placement: Placement


@once_per_setup
def placed_units(setup: Setup, pp_rank: int) -> tuple[PlacedUnit, ...]:
    """The units of a rank along pp, its part of the root first, each with its placement.

    Where tiers have shares of the units, a row of equal units is cut where its tiers change.
    """
    plan, units = setup.plan, units_on(setup, pp_rank)
    places = plan.resting_places
    if all(place.tier == "device" for place in places):
        placement = placement_of(setup, ON_DEVICE)
        return tuple(PlacedUnit(unit, count, placement) for unit, count in units)
    return tuple(PlacedUnit(unit, count, placement_of(setup, tiers)) for unit, count, tiers in _cut(units, places))


def stand_ins(setup: Setup, *alone: int) -> tuple[int, ...]:
    """The rank along pp to look at in place of each, so that few are: it has as many units of every kind or more.

    No rank stands for one before it, on which more micro-batches wait. The first and the last stand for themselves, the
    last with the head, and so do those that are to stand `alone`.
    """
    return _stand_ins(setup.model.units, setup.model.tied, cut_of(setup), setup.plan.resting_places, alone)


@once
def _stand_ins(
    units: tuple[UnitShape, ...], tied: bool, cut: Cut, places: tuple[Place, ...], alone: tuple[int, ...]
) -> tuple[int, ...]:
    chosen: dict[int, Counter[tuple[UnitShape, Tiers]]] = {}
    stand_for: list[int] = []
    for pp_rank in range(cut.ranks):
        own_units = Counter[tuple[UnitShape, Tiers]]()
        for unit, count, tiers in _cut(units_of_pp_rank(units, tied, cut, pp_rank), places):
            own_units[unit, tiers] += count
        own = pp_rank in (cut.ranks - 1, *alone)
        fuller = [other for other, more in chosen.items() if own_units <= more and not own]
        if not fuller:
            chosen[pp_rank] = own_units
        stand_for.append(max(fuller, default=pp_rank))
    return tuple(stand_for)


@once
def _cut(
    units: tuple[tuple[UnitShape, int], ...], places: tuple[Place, ...]
) -> tuple[tuple[UnitShape, int, Tiers], ...]:
    """Rows of equal units with their counts and tiers, cut where their tiers change."""
    row_of = [row for row, (_, count) in enumerate(units) for _ in range(count)]
    tiers_of = [Tiers(*(place.tier_of(index, len(row_of)) for place in places)) for index in range(len(row_of))]
    rows = groupby(zip(row_of, tiers_of, strict=True))
    return tuple((units[row][0], len(list(equal)), tiers) for (row, tiers), equal in rows)
