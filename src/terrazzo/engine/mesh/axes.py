"""The axes of a device mesh: their sizes, this rank's index on them, and the collectives along each."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from terrazzo.engine.comm.backends import backend_of, collectives_for
from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.comm.comm_streams import comm_streams_of
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.mesh.family import DATA_AXES, REPLICAS, SAME_DATA_AXES, STAGES, Family
from terrazzo.engine.mesh.meshes import expert_mesh, groups_of
from terrazzo.engine.runtime import device as devices

__all__ = ["Axes"]


class Axes:
    """The axes of a mesh, innermost first.

    Ranks see different data along the data axes. `dp_shard` and `cp` are one of them, under the name of the first: over
    both together states are split, and gradients are summed. Along `tp` ranks see the same data, and have parts of
    matrices. Where experts are shared, the ranks of `dp_shard`, `cp` and `tp` are those of `edp` and `ep` as well:
    along `ep` they have other experts, and over `edp` the states of these are split, and gradients summed.

    The sets of axes, in those of the mesh and of a family's parameters:

        of_stage            data axes, tp
        with_experts        the same, and edp
        with_stages         of_stage, and pp: every rank of a replica
        with_replicas       of_stage, and replicas: every rank that has this one's stage
        everyone            with_stages, and replicas: every rank of the mesh
        same_data           tp
        summed_over         of the mesh and of dense parameters the data axes; of parameters that ranks along tp share
                            these and tp; of experts edp, and dp_replicate
        summed_same_data    what these two have in common

    Where replicas train by themselves (see `DiLoCo`), `dp_replicate` is none of these axes, but in `replicas`.

    Args:
        tally: where what goes through them is counted.

    Attributes:
        summed_over: the axes over which gradients are summed: the data axes, or those of a family, as `of` gives them.
        of_stage: all of the mesh, but for that of a pipeline's stages.
        replicas: the axis along which ranks train by themselves, if there is one.
        has_experts: whether there are `edp` and `ep`.
        tally: as given.
        device: the device whose memory holds every state.
        comm_streams: where chains of collectives run as a whole; None where the host waits for each.
    """

    def __init__(self, mesh: DeviceMesh, tally: Tally) -> None:
        groups, experts = groups_of(mesh), expert_mesh(mesh)
        self.of_stage, self.tally = tuple(axis for axis in groups if axis != STAGES), tally
        self.replicas: tuple[str, ...] = ()
        self.has_experts = experts is not None
        self.summed_over = tuple(axis for axis in self.of_stage if axis in DATA_AXES)
        if experts is not None:
            groups |= {axis: experts.get_group(axis) for axis in ("edp", "ep")}
        self.device = devices.current(mesh.device_type)
        self._collectives: dict[str, Collectives] = {
            axis: collectives_for(group, self.device, tally.traffic, tally.ledger, axis)
            for axis, group in groups.items()
        }
        backends = [backend_of(group, self.device) for group in groups.values()]
        self.comm_streams = comm_streams_of(self.device, backends)

    def with_replicas_apart(self) -> Axes:
        """The axes of one replica, where the groups along `dp_replicate` train by themselves."""
        apart = copy.copy(self)
        apart.replicas = tuple(axis for axis in self.of_stage if axis == REPLICAS)
        apart.of_stage = tuple(axis for axis in self.of_stage if axis != REPLICAS)
        apart.summed_over = tuple(axis for axis in self.summed_over if axis != REPLICAS)
        return apart

    def of(self, family: Family) -> Axes:
        """The axes for parameters of a family; those that the mesh lacks are left out."""
        data = [axis for axis in self.of_stage if axis in DATA_AXES]
        summed = copy.copy(self)
        summed.summed_over = tuple(axis for axis in family.summed_over(data) if axis in self._collectives)
        return summed

    def cut_along(self, family: Family) -> tuple[str, ...]:
        """The axis along which ranks have other parts of a family's parameters; none where it has one rank."""
        axis = family.cut_along
        return self.live([axis]) if axis in self._collectives else ()

    @property
    def with_experts(self) -> tuple[str, ...]:
        """The axes along which states and gradients are exchanged: those of a stage, and the one of experts' copies."""
        return (*self.of_stage, "edp") if self.has_experts else self.of_stage

    @property
    def summed_same_data(self) -> tuple[str, ...]:
        """The axes along which ranks see the same data and hold the same parameters, whose gradients are summed."""
        return tuple(axis for axis in self.summed_over if axis in SAME_DATA_AXES)

    @property
    def same_data(self) -> tuple[str, ...]:
        """The axes along which ranks see the same data."""
        return tuple(axis for axis in self.of_stage if axis in SAME_DATA_AXES)

    @property
    def stages(self) -> tuple[str, ...]:
        """The axis along which ranks have other parameters, if there is one."""
        return tuple(axis for axis in self._collectives if axis == STAGES)

    @property
    def stage(self) -> int:
        """This rank's number along the axis of stages; 0 where there is none."""
        return self.cuts(self.stages)[0][0] if self.stages else 0

    @property
    def replica(self) -> int:
        """This rank's replica among those that train by themselves; 0 where gradients are summed over them."""
        return self.cuts(self.replicas)[0][0] if self.replicas else 0

    @property
    def with_stages(self) -> tuple[str, ...]:
        """The axes of all ranks of this replica: of the whole mesh, but where replicas train by themselves."""
        return (*self.of_stage, *self.stages)

    @property
    def with_replicas(self) -> tuple[str, ...]:
        """The axes of all ranks that have the same stage of the model, in other replicas too."""
        return (*self.replicas, *self.of_stage)

    @property
    def everyone(self) -> tuple[str, ...]:
        """All axes of the mesh: of every rank, in other replicas too."""
        return (*self.replicas, *self.with_stages)

    def along(self, axis: str) -> Collectives:
        return self._collectives[axis]

    def size(self, axes: Iterable[str]) -> int:
        """How many ranks the axes span."""
        return math.prod(self._collectives[axis].size for axis in axes)

    def live(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The axes with more than one rank: the others split nothing and need no communication."""
        return tuple(axis for axis in axes if self._collectives[axis].size > 1)

    def cuts(self, axes: Iterable[str]) -> list[tuple[int, int]]:
        """This rank's (index, parts) on each axis."""
        return [(self._collectives[axis].rank, self._collectives[axis].size) for axis in axes]

    def is_first(self, axes: Iterable[str]) -> bool:
        """Whether this rank is the first on each of the axes."""
        return all(self._collectives[axis].rank == 0 for axis in axes)

    def maximum(self, values: Tensor, axes: Iterable[str], patience_s: float | None = None) -> Tensor:
        """The elementwise maximum over all ranks of the axes, in place; blocks.

        Args:
            patience_s: as for `Collectives.maximum`, along each axis.
        """
        for axis in self.live(axes):
            self.along(axis).maximum(values, patience_s)
        return values

    def rows(self, values: Tensor, axes: Iterable[str]) -> Tensor:
        """The 1-D `values` of all ranks of the axes, as rows; blocks."""
        rows = values.unsqueeze(0)
        for axis in self.live(axes):
            rows = self.along(axis).gather_rows(rows).flatten(0, 1)
        return rows

    def total(self, value: Tensor, axes: Iterable[str], reduce: Callable[..., Tensor] = torch.sum) -> Tensor:
        """`reduce` of the values of the ranks of `axes`, on rows in rank order: all ranks get equal bits; blocks."""
        for axis in self.live(axes):
            value = reduce(self.along(axis).gather_rows(value), dim=0)
        return value

    def differing(self, facts: Mapping[str, object], axes: Iterable[str]) -> list[str]:
        """Names of the facts that are not the same on all ranks of the axes; blocks.

        Args:
            facts: under the same names on every rank. A number that is on a device is an int64 tensor of one element;
                anything else is what JSON can hold, or `str` can tell apart.
        """
        live = self.live(axes)
        if not facts or not live:
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
        for axis in live:
            self.along(axis).maximum(both)
        return [name for name, same in zip(facts, (highest == ~lowest).tolist(), strict=True) if not same]

    def broadcast(self, values: Tensor, axes: Iterable[str]) -> None:
        """Overwrite `values` with those of the first rank of the axes; blocks. They cross outer links once."""
        live = self.live(axes)
        for position in reversed(range(len(live))):
            if self.is_first(live[:position]):
                self.along(live[position]).broadcast(values)


def _checksum(fact: object) -> int:
    text = json.dumps(fact, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
