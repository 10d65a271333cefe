"""What is moved of a bucket, in bytes: one collective or copy; the sums of gradients that these make in each kind of
backward pass, and what the finished sums are divided by.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from terrazzo.engine.formats.format_names import WireFormat

__all__ = ["Divisor", "GradientFate", "MoveBytes", "ReductionMoves", "Sums"]


class GradientFate(enum.Enum):
    """What becomes of the gradients of a backward.

    This alone says whether a micro-batch is its step's last: `FINISHED`, unless `tz.accumulate` or a step in stages has
    said that more follow, see `ShardingSpec.fate_of`. The schedule has the one of backwards to come
    (`Schedule.set_fate`); a `BackwardPass` keeps the one that it began with, and tells it to all that it calls.
    """

    LOCAL = "added to what is on this rank, and no more"
    REDUCED = "summed over ranks, to the plan's `grad` place"
    FINISHED = "summed over ranks and divided: the step's last micro-batch"
    DROPPED = "reported, unit by unit, on this rank, and forgotten: a backward that no step uses"


class MoveBytes(NamedTuple):
    """One collective, or one copy, of one bucket.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce` or `copy`.
        what: name of what is moved, such as `weights`.
        over: the axis of a collective; of a copy the link, `pcie` or `disk`.
        sent_bytes: by one rank; whole but in plans, whose optimizers may keep a fraction of a byte per element.
        received_bytes: memory for what arrives to be summed, during the first of its `steps`.
        steps: collectives in a row that it is made of.
        sum_bytes: memory of the sum, where that is new memory.
        divides: whether the sum is divided in it, as its last move.
        form: of the blocks that are sent; None where they are elements of a dtype.
    """

    kind: str
    what: str
    over: str
    sent_bytes: float
    received_bytes: int = 0
    steps: int = 1
    sum_bytes: int = 0
    divides: bool = False
    form: WireFormat | None = None


class Divisor(NamedTuple):
    """Number that the finished sum of a step's gradients is divided by, as two factors.

    Attributes:
        denominator: the number of ranks, or what the user has chosen.
        loss_scale: what gradients have been multiplied by on their way in.
    """

    denominator: float = 1.0
    loss_scale: float = 1.0

    @property
    def product(self) -> float:
        return self.denominator * self.loss_scale


class ReductionMoves(NamedTuple):
    """Moves that sum a micro-batch's gradient over ranks: `Gradient` makes them, and whoever plans a step counts them.

    After the `partial` sum, what earlier micro-batches have left is added. That is all, but for a step's last
    micro-batch: of it the `finish` follows, and one division, in a move that `divides` or after them all.

    Attributes:
        partial, finish: reduce-scatters and all-reduces, in their order. An all-reduce of blocks is a reduce-scatter
            and an all-gather.
        partial_axes, axes: over which the partial sum is split, and the one at the end.
        finishing_bytes: the partial sum, in memory of its own while it is finished.
    """

    partial: Sequence[MoveBytes]
    partial_axes: tuple[str, ...]
    finish: Sequence[MoveBytes]
    axes: tuple[str, ...]
    finishing_bytes: int


class Sums(NamedTuple):
    """The reductions of a step's gradients: of micro-batches that are reduced before the last, and of the last."""

    earlier: ReductionMoves
    last: ReductionMoves

    def of(self, fate: GradientFate) -> ReductionMoves:
        """The reduction of a backward whose gradients are `REDUCED` or `FINISHED`."""
        return self.last if fate is GradientFate.FINISHED else self.earlier
