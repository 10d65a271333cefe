"""What activation checkpointing has a block compute again in backward: all that memory says it does not keep."""

from __future__ import annotations

from typing import NamedTuple

from terrazzo.planner.setup.setup import Setup

__all__ = ["RepeatedShares", "repeated_shares"]


class RepeatedShares(NamedTuple):
    """Of a forward's matrix products, of its attention, and of what lies between them."""

    matmul: float
    attention: float
    memory: float


def repeated_shares(setup: Setup) -> RepeatedShares:
    """Of a block that checkpointing covers; what it keeps is in `memory.activations`.

    Selective: of math attention its core alone (arXiv 2205.05198), else what lies between the products. By half: every
    second product too, and of math attention the core.
    """
    if setup.checkpointing == "none":
        return RepeatedShares(0.0, 0.0, 0.0)
    if setup.checkpointing == "full":
        return RepeatedShares(1.0, 1.0, 1.0)
    is_math = setup.attention == "math"
    if setup.checkpointing == "selective_half":
        return RepeatedShares(0.5, float(is_math), 1.0)
    return RepeatedShares(0.0, 1.0, 0.0) if is_math else RepeatedShares(0.0, 0.0, 1.0)
