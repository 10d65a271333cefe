"""How the ranks of a run are laid out: how many each axis has, and which of them exchange along it.

Ranks are laid out with `tp` innermost, then `cp`, `dp_shard`, `dp_replicate` and `pp` outermost, as torchtitan and
Megatron lay them out: what is sent most often stays closest.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from terrazzo.planner.caching import once

__all__ = ["HostCounts", "Mesh", "RankGroup", "group_of", "part_of_group"]

_ORDER = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
"""The mesh axes, innermost first."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh axes. `ep` divides the ranks of `dp_shard`, `cp` and `tp` and adds none of its own."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def batch_ranks(self) -> int:
        """Ranks that are given different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def data_ranks(self) -> int:
        """Ranks of all data axes, over which states may be split: those that share a sequence (`cp`) too."""
        return self.batch_ranks * self.cp

    def in_domains(self, of: int) -> Mesh:
        """This mesh with its data ranks in the fewest shard groups that, with tp and cp beside, stay on a host, or in a
        domain, of so many ranks each.
        """
        ranks, largest = self.batch_ranks, of // (self.tp * self.cp)
        sizes = (size for size in range(min(ranks, largest), 1, -1) if ranks % size == 0)
        meshes = (replace(self, dp_replicate=ranks // size, dp_shard=size) for size in sizes)
        alone = replace(self, dp_replicate=ranks, dp_shard=1)
        return next((mesh for mesh in meshes if group_of(mesh, "dp_shard").on_hosts(of).hosts == 1), alone)

    @property
    def shard_ranks(self) -> int:
        """Ranks of one shard group, over which the engine splits states: `dp_shard` and `cp` are one axis to it."""
        return self.dp_shard * self.cp

    def sizes(self) -> dict[str, int]:
        """Ranks of the data axes, innermost first, as the engine's plans name them; those of one rank are left out."""
        data = {"dp_shard": self.shard_ranks, "dp_replicate": self.dp_replicate}
        return {axis: size for axis, size in data.items() if size > 1}


class HostCounts(NamedTuple):
    """How a group lies on hosts: of all groups along an axis the worst in each, since other axes wait for all of them.

    Attributes:
        fewest, most: ranks of one group on a host, among those hosts that have any.
        hosts: on which one group lies.
    """

    fewest: int
    most: int
    hosts: int


class RankGroup(NamedTuple):
    """Ranks of one collective: `size` of them, `stride` ranks apart. A mesh of `ranks` has one such group beside and
    behind the other, and where hosts do not hold whole ones, some lie across their edges.
    """

    axis: str
    size: int
    stride: int
    ranks: int

    @property
    def span(self) -> int:
        """Neighbouring ranks that it reaches over."""
        return self.size * self.stride

    def on_hosts(self, of: int) -> HostCounts:
        """How the groups of the mesh lie on hosts, or domains, of so many ranks."""
        return _on_hosts(self.size, self.stride, self.ranks, of)


@once
def _on_hosts(size: int, stride: int, ranks: int, of: int) -> HostCounts:
    span, again = size * stride, of // math.gcd(stride, of)  # places on hosts come again after so many ranks of a group
    begins = range(0, min(ranks, math.lcm(span, of)), span)
    firsts = {(begin + beside) % of for begin in begins for beside in range(min(stride, of))}
    counted = min(size, 2 * again + size % again)  # with the same first, last and other hosts
    counts = [Counter((first + number * stride) // of for number in range(counted)).values() for first in firsts]
    hosts = max(min(size, (first + (size - 1) * stride) // of + 1) for first in firsts)
    return HostCounts(min(map(min, counts)), max(map(max, counts)), hosts)


def group_of(mesh: Mesh, axis: str) -> RankGroup:
    """The group along a mesh axis other than `ep`; that of `dp_shard` has the ranks of `cp` too."""
    if axis == "dp_shard":
        return RankGroup(axis, mesh.shard_ranks, mesh.tp, mesh.world_size)
    stride = 1
    for inner in _ORDER:
        if inner == axis:
            break
        stride *= getattr(mesh, inner)
    return RankGroup(axis, getattr(mesh, axis), stride, mesh.world_size)


def part_of_group(mesh: Mesh, axis: str, size: int) -> RankGroup:
    """`size` ranks of the group along an axis: of experts' tensors, what expert parallelism leaves of it."""
    whole = group_of(mesh, axis)
    return whole._replace(size=size, stride=whole.stride * whole.size // size)
