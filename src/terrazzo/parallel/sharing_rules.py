"""What ranks can share, by numbers alone. Callers refuse the rest, each in the words of its own settings."""

from __future__ import annotations

import math

from terrazzo.parallel.context.chunks import Chunks

__all__ = [
    "computes_windows",
    "shares_experts",
    "shares_heads",
    "shares_key_heads",
    "splits_tokens",
    "tokens_step",
]


def shares_heads(heads: int, *axes: int) -> bool:
    """Whether ranks along axes of these sizes can each have as many whole query heads: `tp`, in `ulysses` also `cp`."""
    return heads % math.prod(axes) == 0


def shares_key_heads(heads: int, tp: int) -> bool:
    """Whether ranks along `tp` can each have as many whole key heads, or one that several ranks have."""
    return heads % tp == 0 or tp % heads == 0


def shares_experts(count: int, ep: int) -> bool:
    """Whether ranks along `ep` can each have as many of a module's experts."""
    return count % ep == 0


def splits_tokens(length: int, cp: int, tp: int) -> bool:
    """Whether a rank's tokens along `cp` divide among the ranks along `tp`, which split them between matrices."""
    return length // cp % tp == 0


def tokens_step(chunks: Chunks, tp: int) -> int:
    """The number of tokens of which a sequence must have a multiple, to be cut along `cp` and split along `tp`."""
    return math.lcm(chunks.count, chunks.ranks * tp)


def computes_windows(mode: str) -> bool:
    """Whether a context mode computes sliding windows. A ring would send keys around that no token sees."""
    return mode != "ring"
