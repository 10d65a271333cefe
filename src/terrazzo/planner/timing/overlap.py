"""How much of a unit's communication computation hides.

While a block computes, the next one's weights are gathered and the last one's gradients are reduced. What takes longer
than the block is exposed, and so are the first gather, the last reduction and all that the root unit moves. What the
optimizer's step gathers comes while the next step's first forward computes, where collectives have a stream of their
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terrazzo.planner.figures import Formula
from terrazzo.planner.machine.network import CALL_S, HOP_S, NEAR_HOP_S
from terrazzo.planner.machine.transfers import Link, When

__all__ = ["CONTENTION", "FORMULAS", "BlockRow", "Exposure", "block_exposure", "root_exposure"]

CONTENTION = 0.30
"""Share of hidden communication's time by which computation takes longer beside it: collectives occupy multiprocessors
and memory. Set on MosaicML's runs with few tokens per device."""


FORMULAS = {
    "time.data": Formula(
        "total_s - hidden_s; exposed of a block are max(0, gather - forward) and max(0, gather + reduction - backward),"
        f" and the first gather, the last reduction and the root; each bytes / bandwidth + {CALL_S * 1e6:.0f} us + "
        f"(ranks - 1) * {NEAR_HOP_S[Link.SCALEUP] * 1e6:g} us, or {HOP_S * 1e6:g} us over nodes",
        "overlap as in the engine's schedule; NCCL's ring algorithms",
    ),
    "time.contention": Formula(
        "contention * hidden_s",
        "collectives take multiprocessors and memory from what hides them; set on MosaicML's runs",
    ),
}


@dataclass(frozen=True)
class Exposure:
    """Seconds of one step: communication in all, and what of it computation does not hide."""

    total: float
    exposed: float

    def __add__(self, other: Exposure) -> Exposure:
        return Exposure(self.total + other.total, self.exposed + other.exposed)

    @property
    def hidden(self) -> float:
        return self.total - self.exposed


def root_exposure(moves: Mapping[When, float], repeats: Mapping[When, int]) -> Exposure:
    """What a step waits for moves of the root unit: nothing runs while its weights come, nor while its gradients go.

    Args:
        moves: seconds of its moves by `when`, each time.
        repeats: how often each happens in a step.
    """
    total = sum(seconds * repeats[when] for when, seconds in moves.items())
    return Exposure(total, total)


@dataclass(frozen=True)
class BlockRow:
    """Equal blocks in a row.

    Attributes:
        forward_s, backward_s: of one block and micro-batch, with the communication of other axes that it waits for.
        moves: see `root_exposure`.
        has_backward: whether a gradient goes back through them.
    """

    count: int
    forward_s: float
    backward_s: float
    moves: Mapping[When, float]
    has_backward: bool = True


def block_exposure(rows: Sequence[BlockRow], repeats: Mapping[When, int], prefetch: int, beside: bool) -> Exposure:
    """What a step waits for moves of a rank's blocks. The last reduction of a backward is of the first that has one.

    Args:
        rows: the blocks in the order of forward.
        repeats: see `root_exposure`.
        prefetch: blocks that are gathered ahead; 0 hides no gather.
        beside: collectives run on a stream of their own; on a CPU the step waits for what it gathers.
    """
    silent = repeats[When.BACKWARD] - repeats[When.REDUCE] - repeats[When.LAST]
    passes = ((repeats[When.REDUCE], When.REDUCE), (repeats[When.LAST], When.LAST), (silent, None))
    exposed = repeats[When.FORWARD] * _exposed([_BlockTimes.forward(row) for row in rows], prefetch)
    exposed += sum(
        times * _exposed([_BlockTimes.backward(row, when) for row in rows if row.has_backward], prefetch)
        for times, when in passes
    )
    updated = [_BlockTimes.forward(row, When.UPDATE) for row in rows]
    exposed += repeats[When.UPDATE] * _exposed(updated, prefetch=int(beside))
    total = sum(row.count * seconds * repeats[when] for row in rows for when, seconds in row.moves.items())
    return Exposure(total, exposed)


@dataclass(frozen=True)
class _BlockTimes:
    """What each block of a row gathers, reduces and computes in one pass, seconds."""

    count: int
    gather: float
    reduction: float
    computation: float

    @classmethod
    def forward(cls, row: BlockRow, gather: When = When.FORWARD) -> _BlockTimes:
        return cls(row.count, row.moves.get(gather, 0.0), 0.0, row.forward_s)

    @classmethod
    def backward(cls, row: BlockRow, reduction: When | None) -> _BlockTimes:
        reduced = 0.0 if reduction is None else row.moves.get(reduction, 0.0)
        return cls(row.count, row.moves.get(When.BACKWARD, 0.0), reduced, row.backward_s)


def _exposed(rows: Sequence[_BlockTimes], prefetch: int) -> float:
    """Seconds of a pass that computation does not hide: what exceeds it, and what the block at the end has none for."""
    exposed = 0.0
    for index, row in enumerate(rows):
        beside = row.reduction + (row.gather if prefetch else 0.0)
        exposed += row.count * (max(0.0, beside - row.computation) + (0.0 if prefetch else row.gather))
        exposed += min(beside, row.computation) if index == 0 else 0.0
    return exposed
