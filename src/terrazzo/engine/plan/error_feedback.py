"""What codes of gradients lose, kept for the next step: error feedback, as in 1-bit Adam (arXiv 2102.02888).

Of a gradient g and what is owed of earlier ones, e, a rank sends the codes of u = g + e, and owes what they lose:

    u = g + e,    e = u - decoded(codes of u)

Of a block of g that is zero nothing is sent, and what is owed of it waits. So what is applied and what all ranks still
owe is together the sum of the gradients, to rounding. Where the rank that has added codes sends the sum in codes to
others that keep it, it owes of that in the same way.

What is owed is of sums before their division, and without the loss scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from terrazzo.engine.formats.block_format import tile_numel

__all__ = ["OWED", "OWED_DTYPE", "OWED_OF_SUMS", "Owed", "adding_bytes", "owed_along"]

OWED, OWED_OF_SUMS = "error_feedback", "error_feedback_of_sums"
"""What checkpoints call that of gradients, and that of sums; behind the first of several ranks with a number."""

OWED_DTYPE = torch.bfloat16
"""Of what is kept; it is added in fp32. What this rounding loses is some 1/500 of what is owed (docs/decisions.md)."""


class Owed(NamedTuple):
    """Which elements a rank owes something of.

    Attributes:
        kind: `OWED` or `OWED_OF_SUMS`.
        axes: over which they are split.
        apart: the axes along which each rank owes for itself; along all others ranks owe the same.
    """

    kind: str
    axes: tuple[str, ...]
    apart: tuple[str, ...]


def owed_along(block: str, split: tuple[str, ...], ranks: Iterable[str]) -> Sequence[Owed]:
    """Of gradients that are sent in codes along the axis `block`, and of their sums where all its ranks keep these.

    Args:
        split: the axes over which sums are split in the end, in order.
        ranks: all axes over which gradients are summed, innermost first.
    """
    order = [*split, *(axis for axis in ranks if axis not in split)]  # in which they are summed
    place = order.index(block)
    later = tuple(order[place + 1 :])
    gradients = Owed(OWED, split[:place], (block, *later))
    return [gradients] if block in split else [gradients, Owed(OWED_OF_SUMS, (*split, block), later)]


def adding_bytes(numel: int, device: str) -> int:
    """Memory to add what is owed to so many elements, tile by tile on a kind of device: that in fp32, and the sum."""
    return 8 * min(numel, tile_numel(device))
