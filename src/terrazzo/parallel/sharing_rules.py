"""What ranks can share, in numbers alone: whoever refuses the rest asks here, and says so in words of its own keys."""

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
    """Whether ranks along axes of these sizes have whole query heads, each as many: `tp`, and under `ulysses` `cp`."""
    return heads % math.prod(axes) == 0


def shares_key_heads(heads: int, tp: int) -> bool:
    """Whether ranks along `tp` have whole key heads: each as many, or each one, at which those of several look."""
    return heads % tp == 0 or tp % heads == 0


def shares_experts(count: int, ep: int) -> bool:
    """Whether ranks along `ep` have as many of a module's experts each."""
    return count % ep == 0


def splits_tokens(length: int, cp: int, tp: int) -> bool:
    """Whether the tokens that a rank along `cp` has divide among those along `tp`, as between matrices they do."""
    return length // cp % tp == 0


def tokens_step(chunks: Chunks, tp: int) -> int:
    """Sequences of a multiple of so many tokens make whole chunks, and divide between matrices."""
    return math.lcm(chunks.count, chunks.ranks * tp)


def computes_windows(mode: str) -> bool:
    """Whether tokens may see the last ones alone: in a ring, keys would go round that nobody looks at."""
    return mode != "ring"
