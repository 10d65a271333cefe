"""Which sequences a rank reads, which part of them is its own where ranks share them, and what of it is counted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.config import Config
from terrazzo.parallel import Context
from terrazzo.train.data import IGNORED, Batch
from terrazzo.train.launch.rank.process_group import Ranks

__all__ = ["DataShare", "share_of"]


@dataclass(frozen=True)
class DataShare:
    """The `reader`-th of `readers` shares of all sequences; those of `context`, and along tp, read the same.

    Attributes:
        drawer: what this rank's random numbers are by: ranks along tp drop the same of what all of them have.
        counts: whether its sums count: ranks along tp have the same ones, of which the first one's do, and of stages
            the last one has losses.
    """

    reader: int
    readers: int
    context: Context | None = None
    drawer: int = 0
    counts: bool = True

    def of(self, batch: Batch) -> Batch:
        """This rank's part of a micro-batch of its share. Targets are those of whole sequences, one token ahead.

        Positions stay whole: `Context.place` splits them.
        """
        if self.context is None:
            return batch
        positions = batch.positions
        if positions is None:
            positions = torch.arange(batch.inputs.shape[1]).expand_as(batch.inputs)
        inputs, targets = self.context.split(batch.inputs, batch.targets)
        learnt = int((targets != IGNORED).sum())
        return replace(batch, inputs=inputs, targets=targets, positions=positions, valid_tokens=learnt, samples=learnt)

    def total(self, own: Tensor) -> Tensor:
        """The sum of what each rank has found of its own tokens, in place. Collective."""
        if not self.counts:
            own.zero_()
        dist.all_reduce(own)
        return own


def share_of(config: Config, ranks: Ranks, context: Context | None = None) -> DataShare:
    """What this rank reads: neighbouring ranks share sequences, as `context` says, and matrices; stages read alike."""
    mesh = config.plan.mesh
    drawer, place = divmod(ranks.rank, mesh.tp)
    readers = mesh.readers(ranks.world_size)
    stage, reader = divmod(ranks.rank // mesh.ranks_per_batch, readers)
    return DataShare(reader, readers, context, drawer, counts=place == 0 and stage == mesh.pp - 1)
