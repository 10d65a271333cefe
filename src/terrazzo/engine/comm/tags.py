"""Tags of the messages that two ranks of a group send each other: none is received in the place of another's."""

from __future__ import annotations

from itertools import pairwise

__all__ = ["ACTIVATIONS", "EXCHANGES", "NEVER_SENT", "TIED_FLAGS", "TIED_GRADIENTS", "WRITTEN_WEIGHTS"]

EXCHANGES = range(1 << 30)
"""Tags of collectives made of messages: each is a hash of what is moved."""
ACTIVATIONS = range(EXCHANGES.stop, EXCHANGES.stop + (1 << 29))
"""Tags of what stages of a pipeline hand on: by step, micro-batch and stage."""
TIED_GRADIENTS, TIED_FLAGS, WRITTEN_WEIGHTS, NEVER_SENT = range(ACTIVATIONS.stop, ACTIVATIONS.stop + 4)
"""Tags of the gradients of parameters that stages share, and of whether there are any; of what a user has written into
such parameters; of no message at all.
"""

_ALL = (
    EXCHANGES,
    ACTIVATIONS,
    *(range(tag, tag + 1) for tag in (TIED_GRADIENTS, TIED_FLAGS, WRITTEN_WEIGHTS, NEVER_SENT)),
)
assert all(before.stop <= after.start for before, after in pairwise(_ALL)), "tags overlap"
assert _ALL[-1].stop <= 1 << 31, "gloo's tags are 32-bit integers, and none is negative"
