"""The axes of a device mesh: sets of them, sizes, this rank's index on each, and what ranks exchange along them."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.engine.comm.backends import backend_of, collectives_for
from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.comm.comm_streams import comm_streams_of
from terrazzo.engine.comm.failed_exchanges import MeshGroups
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.mesh.family import REPLICA_AXIS, STAGE_AXIS, Family, seeing_other_data, seeing_same_data
from terrazzo.engine.mesh.meshes import expert_mesh, groups_of
from terrazzo.engine.runtime import device as devices
from terrazzo.engine.runtime.calls import do_nothing

__all__ = ["ANYWHERE_NUMEL", "DIFFERING_NUMEL", "Axes"]

ANYWHERE_NUMEL = 1
"""int64 elements that `Axes.anywhere` exchanges over every axis."""
DIFFERING_NUMEL = 2
"""int64 elements that `Axes.differing` exchanges over every axis, for each fact."""


class Axes:
    """The axes of a mesh, innermost first, as the engine uses them:

        tp                          ranks see the same data, and have parts of matrices
        dp_shard, dp_replicate      they see other data
        pp                          they have other stages of the model
        edp, ep                     where experts are shared, the ranks of `dp_shard` and `tp` again: along `ep` they
                                    have other experts, along `edp` the same

    `dp_shard` and `cp` are one of them, under the name of the first: over both together states are split, and gradients
    summed.

    Methods that span several ranks are told over which axes. Those that block raise `RanksApart` on every rank of the
    mesh, with the place of each, where one has come to something else, or to the same over other axes; nothing is
    exchanged from then on. These are the sets of all ranks that:

        data            see other data, in this stage and replica
        same_data       see the same data, there
        within_stage    have this stage, in this replica: both of these
        within_replica  have a stage of this replica: the same, and `stage_axis`
        same_stage      have this stage, in any replica: `within_stage`, and `replica_axis`
        whole_mesh      are in the mesh

    There is one replica, unless replicas train by themselves (see `DiLoCo`): then their axis, `dp_replicate`, is
    `replica_axis`, and none of the data axes.

    Args:
        tally: where what goes through them is counted.
        shared: whether they are for several models, and not for the next.

    Attributes:
        stage_axis: the axis along which ranks have other stages of a pipeline; empty without one.
        replica_axis: the axis along which ranks train by themselves; empty without one.
        has_experts: whether there are `edp` and `ep`.
        tally: as given.
        device: the device whose memory holds every state.
        comm_streams: where chains of collectives run as a whole; None where the host waits for each.
    """

    def __init__(self, mesh: DeviceMesh, tally: Tally, shared: bool = False) -> None:
        groups, experts = groups_of(mesh), expert_mesh(mesh)
        self._names, self.tally = tuple(groups), tally
        self.stage_axis = tuple(axis for axis in groups if axis == STAGE_AXIS)
        self.replica_axis: tuple[str, ...] = ()
        self._before_replicas_meet: Callable[[], None] = do_nothing
        self.has_experts = experts is not None
        if experts is not None:
            groups |= {axis: experts.get_group(axis) for axis in ("edp", "ep")}
        self.device = devices.current(mesh.device_type)
        self._mesh_groups = MeshGroups(shared)
        self._collectives: dict[str, Collectives] = {
            axis: collectives_for(group, self.device, tally.traffic, tally.ledger, axis, self._mesh_groups)
            for axis, group in groups.items()
        }
        backends = [backend_of(group, self.device) for group in groups.values()]
        self.comm_streams = comm_streams_of(self.device, backends)

    def with_replicas_apart(self) -> Axes:
        """The same axes, where the groups along `dp_replicate` train by themselves."""
        apart = copy.copy(self)
        apart.replica_axis = tuple(axis for axis in self._names if axis == REPLICA_AXIS)
        return apart

    def before_replicas_meet(self, action: Callable[[], None]) -> None:
        """Have `action` called on all ranks before anything else goes along `replica_axis`: it ends what is under way
        there, of which some ranks may have begun the next collective and some not.
        """
        self._before_replicas_meet = action

    # -- sets of axes ------------------------------------------------------------------------------------------

    @property
    def within_stage(self) -> tuple[str, ...]:
        return tuple(axis for axis in self._names if axis not in (*self.stage_axis, *self.replica_axis))

    @property
    def data(self) -> tuple[str, ...]:
        return seeing_other_data(self.within_stage)

    @property
    def same_data(self) -> tuple[str, ...]:
        return seeing_same_data(self.within_stage)

    @property
    def within_replica(self) -> tuple[str, ...]:
        return (*self.within_stage, *self.stage_axis)

    @property
    def same_stage(self) -> tuple[str, ...]:
        return (*self.replica_axis, *self.within_stage)

    @property
    def whole_mesh(self) -> tuple[str, ...]:
        return (*self.replica_axis, *self.within_replica)

    def summed_over(self, family: Family) -> tuple[str, ...]:
        """The axes over which gradients of a family are summed."""
        return tuple(axis for axis in family.summed_over(self.data) if axis in self._collectives)

    def cut_along(self, family: Family) -> tuple[str, ...]:
        """The axis along which ranks have other parts of a family's parameters; none where it has one rank."""
        axis = family.cut_along
        return self.live([axis]) if axis in self._collectives else ()

    def live(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The axes with more than one rank: the others split nothing and need no communication."""
        return tuple(axis for axis in axes if self._collectives[axis].size > 1)

    # -- this rank, and how many there are ---------------------------------------------------------------------

    @property
    def pp_rank(self) -> int:
        """This rank's index along the axis of stages; 0 without one."""
        return self._index(self.stage_axis)

    @property
    def replica(self) -> int:
        """This rank's replica among those that train by themselves; 0 where gradients are summed over them."""
        return self._index(self.replica_axis)

    def _index(self, axis: tuple[str, ...]) -> int:
        return self._collectives[axis[0]].rank if axis else 0

    def size(self, axes: Iterable[str]) -> int:
        """How many ranks the axes span."""
        return math.prod(self._collectives[axis].size for axis in axes)

    def coordinates(self, axes: Iterable[str]) -> list[tuple[int, int]]:
        """This rank's (index, ranks) on each axis."""
        return [(self._collectives[axis].rank, self._collectives[axis].size) for axis in axes]

    def is_first(self, axes: Iterable[str]) -> bool:
        """Whether this rank is the first on each of the axes."""
        return all(self._collectives[axis].rank == 0 for axis in axes)

    # -- exchanges ---------------------------------------------------------------------------------------------

    def along(self, axis: str) -> Collectives:
        """The collectives of one axis."""
        return self._collectives[axis]

    @property
    def of_states(self) -> Sequence[Collectives]:
        """The collectives that states and gradients go through: of each axis of `within_stage`, and of `edp`."""
        return [self._collectives[axis] for axis in (*self.within_stage, *(("edp",) if self.has_experts else ()))]

    def _live_links(self, axes: Iterable[str]) -> dict[str, Collectives]:
        """The collectives of the axes with more than one rank, for an exchange over all of them that comes now."""
        live = self.live(axes)
        if not {*live}.isdisjoint(self.replica_axis):
            self._before_replicas_meet()
        return {axis: self.along(axis) for axis in live}

    def maximum(self, values: Tensor, axes: Iterable[str], timeout_s: float | None = None) -> Tensor:
        """The elementwise maximum over all ranks of the axes, in place; blocks.

        Args:
            timeout_s: as for `Collectives.maximum`, along each axis.
        """
        links = self._live_links(axes)
        for along in links.values():
            along.maximum(values, timeout_s, over=[*links])
        return values

    def rows(self, values: Tensor, axes: Iterable[str]) -> Tensor:
        """The 1-D `values` of all ranks of the axes, as rows; blocks."""
        rows, links = values.unsqueeze(0), self._live_links(axes)
        for along in links.values():
            rows = along.gather_rows(rows, over=[*links]).flatten(0, 1)
        return rows

    def total(self, value: Tensor, axes: Iterable[str], reduce: Callable[..., Tensor] = torch.sum) -> Tensor:
        """`reduce` of the values of the ranks of `axes`, on rows in rank order: all ranks get equal bits; blocks."""
        links = self._live_links(axes)
        for along in links.values():
            value = along.reduced(value, reduce, over=[*links])
        return value

    def break_off(self) -> None:
        """This rank exchanges nothing any more: others that wait for it hear that at once, where a backend can."""
        self._mesh_groups.break_off()

    def meet(self, axes: Iterable[str]) -> None:
        """Wait for all ranks of the axes, each about to do what its label says; `RanksApart` where that differs."""
        self.maximum(torch.empty(0, device=devices.HOST), axes)

    def anywhere(self, flag: bool, axes: Iterable[str]) -> bool:
        """Whether `flag` is set on any rank of the axes; blocks."""
        return bool(self.maximum(torch.tensor([int(flag)], device=devices.HOST), axes).item())

    def differing(self, facts: Mapping[str, object], axes: Iterable[str]) -> list[str]:
        """Names of the facts that are not the same on all ranks of the axes; blocks.

        Args:
            facts: under the same names on every rank. A number that is on a device is an int64 tensor of one element;
                anything else is what JSON can hold, or `str` can tell apart.
        """
        if not facts or not (links := self._live_links(axes)):
            return []
        checksums = torch.stack(
            [
                fact.to(devices.HOST).reshape(())
                if isinstance(fact, Tensor)
                else torch.tensor(_checksum(fact), device=devices.HOST)
                for fact in facts.values()
            ]
        )
        highest, lowest = both = torch.stack([checksums, ~checksums])
        for along in links.values():
            along.maximum(both, over=[*links])
        return [name for name, same in zip(facts, (highest == ~lowest).tolist(), strict=True) if not same]

    def broadcast(self, values: Tensor, axes: Iterable[str]) -> None:
        """Overwrite `values` with those of the first rank of the axes; blocks. They cross outer links once.

        Where ranks are apart, those to which nobody who knows that sends or brings anything have these values. They
        hear it in what they exchange next with one who knows.
        """
        links = self._live_links(axes)
        over = [*links]
        for position, along in reversed([*enumerate(links.values())]):
            if self.is_first(over[:position]):
                along.broadcast(values, over=over)


def _checksum(fact: object) -> int:
    text = json.dumps(fact, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
