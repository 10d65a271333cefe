"""Replicas that train by themselves, and what an outer step makes of them: DiLoCo (arXiv 2311.08105) and local SGD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from terrazzo.engine.formats.format_names import WireFormat
from terrazzo.engine.plan.layout import ALIGN, round_up
from terrazzo.errors import BadInput
from terrazzo.given_numbers import is_count, is_number
from terrazzo.messages import did_you_mean

__all__ = [
    "OUTER_BLOCKS",
    "OUTER_MOMENTUM",
    "DiLoCo",
]

OuterTraffic = Literal["fp32", "int8"]
_OUTER_TRAFFIC: tuple[str, ...] = get_args(OuterTraffic)

OUTER_BLOCKS = WireFormat.INT8.blocks
"""Blocks in which Δ is sent under `int8`."""
OUTER_MOMENTUM = "outer_momentum"
"""Name of b in checkpoints."""

MESSAGE_NUMEL = 4 << 20
"""Elements of outer gradients that are exchanged at once: 16 MiB, beside which the time of one exchange is little."""


@dataclass(frozen=True)
class DiLoCo:
    """The groups of a mesh's axis `dp_replicate` train by themselves, and agree every `sync_every` optimizer steps.

    Then an outer step follows, of SGD with Nesterov's momentum on the weights θ that the round began with:

        Δ = mean over replicas of (θ − their weights),  b = momentum · b + Δ,  θ = θ − lr · (Δ + momentum · b)

    All replicas go on from θ. With `lr=1` and `momentum=0`, θ becomes the mean of their weights: local SGD.

    Attributes:
        sync_every: optimizer steps of a round.
        lr, momentum: of the outer step.
        traffic: what Δ is sent as: `fp32`, or `int8`, in blocks of 256 codes with a scale. Of the blocks every replica
            takes the same mean, its own among them.

    Raises:
        BadInput: for values that cannot work.
    """

    sync_every: int
    lr: float = 0.7
    momentum: float = 0.9
    traffic: OuterTraffic = "fp32"

    def __post_init__(self) -> None:
        if not is_count(self.sync_every):
            raise BadInput(
                f"diloco: sync_every is {self.sync_every!r}; it counts optimizer steps: give an int, 1 or more."
            )
        if not is_number(self.lr) or not 0 < self.lr < math.inf:
            raise BadInput(f"diloco: lr is {self.lr!r}; give a positive number, such as 0.7.")
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise BadInput(f"diloco: momentum is {self.momentum!r}; give a number from 0 to below 1, such as 0.9.")
        if self.traffic not in _OUTER_TRAFFIC:
            raise BadInput(
                f"diloco: traffic {self.traffic!r} does not exist.{did_you_mean(str(self.traffic), _OUTER_TRAFFIC)} "
                f"Use one of {', '.join(_OUTER_TRAFFIC)}."
            )

    @property
    def states(self) -> int:
        """Number of states in fp32 that are kept for each element: θ, and b where there is momentum."""
        return 2 if self.momentum else 1

    @property
    def align(self) -> int:
        """Parameters and shards begin on multiples of so many elements: a block has one scale, wherever it lies."""
        return OUTER_BLOCKS.numel if self.traffic == "int8" else ALIGN

    def messages(self, numel: int) -> list[int]:
        """Elements of each message, for `numel` elements that a rank has a part of."""
        return [min(MESSAGE_NUMEL, numel - start) for start in range(0, numel, MESSAGE_NUMEL)]

    def message_numel(self, numel: int, replicas: int) -> int:
        """Elements of a message of `numel`, with what makes it as long for each replica."""
        return round_up(numel, replicas)

    def held_bytes(self, numel: int, replicas: int, device: str) -> int:
        """Bytes of one message, and to make it and take its step a tile at a time.

        Args:
            device: its kind.
        """
        blocks = OUTER_BLOCKS.size_bytes(numel) * replicas if self.traffic == "int8" else 0
        return self.message_numel(numel, replicas) * 4 + blocks + OUTER_BLOCKS.scratch_bytes(numel, device)

    def sent_bytes(self, numel: int, replicas: int) -> int:
        """Bytes that a rank sends to exchange `numel` elements."""
        if self.traffic == "int8":
            return OUTER_BLOCKS.size_bytes(numel) * (replicas - 1)
        return 2 * (self.message_numel(numel, replicas) * 4 // replicas) * (replicas - 1)
