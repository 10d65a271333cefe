"""How the ranks of a run are laid out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

__all__ = ["Mesh"]


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

    def in_hosts(self, per_node: int) -> Mesh:
        """This mesh with its data ranks in the fewest shard groups that, with tp and cp beside, stay on a host each."""
        ranks, largest = self.batch_ranks, max(1, per_node // (self.tp * self.cp))
        shard = math.gcd(ranks, largest)
        return replace(self, dp_replicate=ranks // shard, dp_shard=shard)

    @property
    def shard_ranks(self) -> int:
        """Ranks of one shard group, over which the engine splits states: `dp_shard` and `cp` are one axis to it."""
        return self.dp_shard * self.cp

    def sizes(self) -> dict[str, int]:
        """Ranks of the data axes, innermost first, as the engine's plans name them; those of one rank are left out."""
        data = {"dp_shard": self.shard_ranks, "dp_replicate": self.dp_replicate}
        return {axis: size for axis, size in data.items() if size > 1}
