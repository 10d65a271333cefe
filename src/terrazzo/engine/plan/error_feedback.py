"""Error feedback: what codes of gradients lose is added to the next ones, as in 1-bit Adam (arXiv 2102.02888).

A rank sends the codes of u, the sum of a gradient g and of the residual e of earlier ones; what they lose is the next
residual:

    u = g + e,    e = u - decoded(codes of u)

Of a block of g that is zero nothing is sent, and its residual waits. So what is applied and the residuals of all ranks
are together the sum of the gradients, to rounding. Where the rank that has added codes sends the sum in codes to others
that keep it, that sum has a residual in the same way.

Residuals are of sums before their division, and without the loss scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from terrazzo.engine.formats.block_format import tile_numel

__all__ = ["RESIDUAL", "RESIDUAL_DTYPE", "RESIDUAL_OF_SUMS", "ResidualSpec", "adding_bytes", "residuals_along"]

RESIDUAL, RESIDUAL_OF_SUMS = "error_feedback", "error_feedback_of_sums"
"""Names of residuals in checkpoints, of gradients and of sums; those of all ranks but the first end in a number."""

RESIDUAL_DTYPE = torch.bfloat16
"""Dtype in which residuals are kept; they are added in fp32. This loses some 1/500 of them (docs/decisions.md)."""


class ResidualSpec(NamedTuple):
    """Elements of which a rank has a residual.

    Attributes:
        kind: `RESIDUAL` or `RESIDUAL_OF_SUMS`.
        axes: over which they are split.
        apart: the axes along which each rank has one of its own; along all others ranks have the same.
    """

    kind: str
    axes: tuple[str, ...]
    apart: tuple[str, ...]


def residuals_along(block: str, split: tuple[str, ...], ranks: Iterable[str]) -> Sequence[ResidualSpec]:
    """Residuals of gradients that are sent in codes along the axis `block`, and of sums that all its ranks keep.

    Args:
        split: the axes over which sums are split in the end, in order.
        ranks: all axes over which gradients are summed, innermost first.
    """
    order = [*split, *(axis for axis in ranks if axis not in split)]  # in which they are summed
    position = order.index(block)
    later = tuple(order[position + 1 :])
    gradients = ResidualSpec(RESIDUAL, split[:position], (block, *later))
    return [gradients] if block in split else [gradients, ResidualSpec(RESIDUAL_OF_SUMS, (*split, block), later)]


def adding_bytes(numel: int, device: str) -> int:
    """Bytes to add residuals of `numel` elements, tile by tile on a kind of device: these in fp32, and the sum."""
    return 8 * min(numel, tile_numel(device))
