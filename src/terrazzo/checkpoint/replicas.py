"""States that several ranks hold alike, compared: memory that has changed on one of them is found and named."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrazzo.engine import Engine, ModelState, Piece, engine_of
from terrazzo.engine.labels.label import collective_call, labelled
from terrazzo.errors import CopiesDiffer
from terrazzo.exchange import gather_json

__all__ = ["check_replicas"]


@labelled(collective_call("tz.checkpoint.check_replicas(model)"))
def check_replicas(model: nn.Module) -> None:
    """Compare all states of which ranks hold copies, by checksums. Collective.

    They are weights, master weights, averages of weights, optimizer states, residuals of codes of gradients, and the
    momentum of outer steps. What a plan splits over all ranks has no copies, and is not read.

    Raises:
        CopiesDiffer: they differ; names the state, and the ranks whose copy is not that of most.
    """
    engine = engine_of(model)
    problems = [_difference(engine, along, pieces) for along, pieces in ModelState(model).copies()]
    first = next((problem for rank in gather_json(problems) for problem in rank if problem is not None), None)
    if first is not None:
        raise CopiesDiffer(
            f"{first}. Training leaves them equal: memory has changed by itself, or a rank has written to its own."
            " Start again from a checkpoint, without that rank's machine if it happens again."
        )


def _difference(engine: Engine, along: tuple[str, ...], pieces: list[Piece]) -> str | None:
    """What is wrong with the copies of `pieces`, if anything; the same on all ranks that have them."""
    axes = engine.axes
    count = torch.tensor([len(pieces)], device=axes.device)
    if not all(_equal(engine, along, count)):
        return "Ranks that should hold copies of the same states do not hold as many"
    sums = torch.tensor([piece.digest() for piece in pieces], dtype=torch.int64, device=axes.device)
    for piece, value, same in zip(pieces, sums, _equal(engine, along, sums), strict=True):
        if not same:
            rows = torch.stack([torch.tensor(dist.get_rank(), device=axes.device), value]).unsqueeze(0)
            for axis in along:
                rows = axes.along(axis).gather_rows(rows).flatten(0, 1)
            return _named(piece, rows)
    return None


def _equal(engine: Engine, along: tuple[str, ...], values: Tensor) -> list[bool]:
    """For each of the values, whether it is the same on the ranks of these axes."""
    both = torch.stack([values, ~values])
    for axis in along:
        engine.axes.along(axis).maximum(both)
    same: list[bool] = (both[0] == ~both[1]).tolist()
    return same


def _named(piece: Piece, rows: Tensor) -> str:
    """Whose copies are others than those of most; where there is no such majority, all ranks that have one."""
    copies: list[list[int]] = sorted(rows.tolist())
    (usual, count), *_ = Counter(value for _, value in copies).most_common()
    most = 2 * count > len(copies)
    ranks = [rank for rank, value in copies if not most or value != usual]
    others = "those of the others" if most else "each other"
    part = f" of {piece.tile}" if piece.tile.sizes not in (piece.shape, (piece.numel,)) else ""
    return (
        f"{piece.name}, {piece.kind}, elements {piece.start} to {piece.stop - 1}{part}: of {len(copies)} copies that"
        f" should be equal, rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} differ"
        f"{'s' if len(ranks) == 1 else ''} from {others}"
    )
