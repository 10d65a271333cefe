"""Stand-ins for the other ranks, so that one process runs a model as one rank of several, without sending anything.

Shapes are those of a run, and values mean nothing: the planner counts the memory that tensors take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from terrazzo.engine.comm.collectives import Collectives
from terrazzo.engine.comm.host.gloo import NEAR_BLOCK_BYTES
from terrazzo.engine.comm.links import Links
from terrazzo.engine.comm.transfer import Handle, Moves
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic
from terrazzo.parallel.context.attention_masks import AttentionMask
from terrazzo.parallel.context.context import Context
from terrazzo.parallel.exchanges import AxisRanks
from terrazzo.parallel.tensor.activation_exchanges import TensorRanks
from terrazzo.parallel.tensor.apply_plan import cut_matrices
from terrazzo.parallel.tensor.model_plans import own_plan
from terrazzo.parallel.tensor.read_plan import TensorPlan, cuts_of, styles_of

__all__ = ["SimulatedContext", "cut_simulated"]


class SimulatedContext(Context):
    """The first of `ranks` that share sequences.

    Args:
        documents: whether sequences have several, whose bounds nobody knows.
    """

    is_simulated = True

    def __init__(self, ranks: int, mode: str, balance: str, documents: bool) -> None:
        super().__init__(AxisRanks(_SimulatedCollectives(ranks, rank=0)), mode, balance)
        self._documents = documents

    def mask(
        self,
        positions: Tensor | None,
        tokens: int,
        window: int | None = None,
        stride: int | None = None,
        prefix: Tensor | None = None,
    ) -> AttentionMask:
        """With documents or a prefix every tile has a mask, and none is left out but those behind the window."""
        runs = self._places.runs(tokens, self.is_split)
        own_tokens = sum(run.length for run in runs)
        begins = None if positions is None or not self._documents else positions.new_zeros((len(positions), own_tokens))
        ends = None if prefix is None else prefix.new_zeros((len(prefix), own_tokens))
        if begins is None and ends is None:
            return AttentionMask.of(runs, None, None, window, stride)
        return AttentionMask(tuple(runs), begins, ends, window=window, stride=stride).of_unknown()


def cut_simulated(
    model: nn.Module, size: int, sequence: bool = True, tensor: TensorPlan | Literal["auto"] = "auto"
) -> TensorRanks:
    """Cut `model`, on the meta device, as `tz.parallelize` does for the last of `size` ranks along `tp`.

    Its parts are the largest where sizes do not divide.

    Returns:
        What stands in for the ranks.

    Raises:
        BadInput: as there.
    """
    plan = own_plan(model, size) if isinstance(tensor, str) else tensor
    ranks = TensorRanks(_SimulatedCollectives(size, rank=size - 1), axes=None)
    cut_matrices(cuts_of(model, ranks, styles_of(model, plan), sequence))
    return ranks


class _NoLinks(Links):
    """To ranks that there are not."""

    def __init__(self, size: int, rank: int) -> None:
        self.axis, self.size, self.rank, self.model = "", size, rank, 0

    def next_model(self) -> int:
        return 0


class _SimulatedCollectives(Collectives):
    """Allocates what those of ranks on one CPU host do."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(_NoLinks(size, rank), Traffic(), Ledger())

    def _all_gather(self, full: Tensor, kind: str) -> Moves[Tensor]:
        yield from ()
        return full

    def _reduce_scatter(self, full: Tensor, dtype: torch.dtype, kind: str) -> Moves[Tensor]:
        yield from ()
        received = full.new_empty(self.receive_bytes(full.nbytes) // full.itemsize)
        total = full.new_empty(full.numel() // self.size, dtype=dtype)
        del received
        return total

    def _all_to_all(
        self, sent: Tensor, sent_numels: Sequence[int], received: Tensor, received_numels: Sequence[int], kind: str
    ) -> Moves[None]:
        yield Handle(keep=(sent, received))

    def receive_bytes(self, full_bytes: int) -> int:
        return (self.size - 1) * min(full_bytes // self.size, NEAR_BLOCK_BYTES)
