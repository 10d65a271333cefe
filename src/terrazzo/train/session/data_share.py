"""Which sequences a rank reads, its part of them if ranks share sequences, and whether its sums count."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.config import Config
from terrazzo.launch.rank.process_group import Ranks
from terrazzo.parallel import Context
from terrazzo.train.data import IGNORED, Batch

__all__ = ["DataShare", "share_of"]


@dataclass(frozen=True)
class DataShare:
    """What this rank reads: share `reader` of `readers`. Ranks along cp and tp, and pipeline stages, read the same.

    Attributes:
        context: splits sequences along cp; None if ranks do not share them.
        drawer: seeds this rank's random numbers; it is the same along tp, where ranks must drop the same activations.
        counts: whether this rank's sums count: along tp all ranks have the same sums, and only the first one's count;
            of pipeline stages only the last one has losses.
    """

    reader: int
    readers: int
    context: Context | None = None
    drawer: int = 0
    counts: bool = True

    def of(self, batch: Batch) -> Batch:
        """This rank's part of a micro-batch. Targets are those of the whole sequences, one token ahead.

        Positions and lengths of prompts stay whole: `Context.place` and `place_prefix` split them.
        """
        if self.context is None:
            return batch
        positions = batch.positions
        if positions is None:
            positions = torch.arange(batch.inputs.shape[1]).expand_as(batch.inputs)
        whole = {"inputs": batch.inputs, "targets": batch.targets}
        if batch.padding_mask is not None:
            whole["padding_mask"] = batch.padding_mask
        parts = dict(zip(whole, self.context.split(*whole.values()), strict=True))
        learnt = int((parts["targets"] != IGNORED).sum())
        return replace(batch, positions=positions, valid_tokens=learnt, samples=learnt, **parts)

    def total(self, own: Tensor) -> Tensor:
        """Sum over all ranks what each has found for its own tokens, in place. Collective."""
        if not self.counts:
            own.zero_()
        dist.all_reduce(own)
        return own


def share_of(config: Config, ranks: Ranks, context: Context | None = None) -> DataShare:
    """What this rank reads, by its place in the mesh."""
    mesh = config.plan.mesh
    drawer, tp_rank = divmod(ranks.rank, mesh.tp)
    readers = mesh.readers(ranks.world_size)
    stage, reader = divmod(ranks.rank // mesh.ranks_per_batch, readers)
    return DataShare(reader, readers, context, drawer, counts=tp_rank == 0 and stage == mesh.pp - 1)
