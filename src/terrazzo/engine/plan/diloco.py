"""Replicas that train by themselves, and what outer steps make of them: DiLoCo (arXiv 2311.08105) and local SGD.

A fragment at a time, beside training, it is Streaming DiLoCo (arXiv 2501.18512).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar, get_args

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
"""Elements of outer gradients that are waited for at once: 16 MiB, beside which the time of one exchange is little."""

T = TypeVar("T")


@dataclass(frozen=True)
class DiLoCo:
    """The groups of a mesh's axis `dp_replicate` train by themselves, and agree every `sync_every` optimizer steps.

    Then an outer step follows, of SGD with Nesterov's momentum on the weights θ that the round began with:

        Δ = mean over replicas of (θ − their weights),  b = momentum · b + Δ,  θ = θ − lr · (Δ + momentum · b)

    All replicas go on from θ. With `lr=1` and `momentum=0`, θ becomes the mean of their weights: local SGD.

    Replicas stream where there are several `fragments`, or a `delay`: the fragments take outer steps one after the
    other, each every `sync_every` steps, and what has been trained while Δ was on its way stays: weights become
    `mixing` · weights + (1 − `mixing`) · θ. So replicas differ until they meet: behind every `meet_every`-th step all
    fragments take their outer step at once, all weights become θ, and the next round begins.

    Attributes:
        sync_every: optimizer steps from one outer step to the next.
        lr, momentum: of the outer step.
        traffic: what Δ is sent as: `fp32`, or `int8`, in blocks of 256 codes with a scale. Of the blocks every replica
            takes the same mean, its own among them.
        fragments: into how many sets of neighbouring units the model is cut.
        delay: optimizer steps that Δ is on its way while training goes on; 0: it is waited for.
        mixing: how much of their own weights replicas keep at an outer step that comes with a delay.
        meet_every: optimizer steps of a round of replicas that stream; of others a round is `sync_every`.

    Raises:
        BadInput: for values that cannot work.
    """

    sync_every: int
    lr: float = 0.7
    momentum: float = 0.9
    traffic: OuterTraffic = "fp32"
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.5
    meet_every: int | None = None

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
        self._check_streaming()

    def _check_streaming(self) -> None:
        every, apart = self.sync_every, self.sync_every // self.fragments if is_count(self.fragments) else 0
        if not apart:
            raise BadInput(
                f"diloco: fragments is {self.fragments!r}; they take their outer steps at other steps of sync_every "
                f"{every}: give an int from 1 to {every}."
            )
        if not is_count(self.delay, least=0) or self.delay > apart:
            raise BadInput(
                f"diloco: delay is {self.delay!r}; one fragment is exchanged at a time, and of {self.fragments} in "
                f"sync_every {every} the next one begins {apart} steps later: give an int from 0 to {apart}."
            )
        if not is_number(self.mixing) or not 0 <= self.mixing < 1:
            raise BadInput(f"diloco: mixing is {self.mixing!r}; give a number from 0 to below 1, such as 0.5.")
        if self.mixing != DiLoCo.mixing and not self.delay:
            raise BadInput(
                f"diloco: mixing is {self.mixing!r}, and without a delay nothing is trained while an outer step "
                "is under way: weights become θ. Leave mixing out, or set delay=1 or more."
            )
        if not self.streams:
            if self.meet_every is not None:
                raise BadInput(
                    f"diloco: meet_every is {self.meet_every!r}, and without fragments or a delay replicas meet at "
                    "each outer step. Leave meet_every out, or set fragments=2 or more, or delay=1 or more."
                )
        elif not is_count(self.meet_every, least=2 * every) or self.meet_every % every:
            raise BadInput(
                f"diloco: meet_every is {self.meet_every!r}; replicas that stream, by fragments={self.fragments} and "
                f"delay={self.delay}, have equal weights only when they meet: give a multiple of sync_every {every}, "
                f"such as {10 * every}."
            )
        elif not self.exchanged_in_round():
            raise BadInput(
                f"diloco: delay is {self.delay!r}, and what leaves behind step {every} would be back at step "
                f"{every + self.delay}, where replicas meet: no outer step would be taken before. Give a delay below "
                f"{every}, or meet_every={3 * every} or more."
            )

    @property
    def streams(self) -> bool:
        """Whether there are outer steps within rounds."""
        return self.fragments > 1 or self.delay > 0

    @property
    def round_steps(self) -> int:
        """Optimizer steps of a round, behind which all replicas have the same weights."""
        return self.meet_every or self.sync_every

    @property
    def kept(self) -> float:
        """Share of their own weights that replicas keep at an outer step within a round."""
        return self.mixing if self.delay else 0.0

    def fragment_behind(self, step: int) -> int | None:
        """The fragment whose outer gradients leave behind that step of a round, if one does.

        None does that would not be back before the round ends.
        """
        if step + self.delay >= self.round_steps:
            return None
        within = (step - 1) % self.sync_every + 1
        ends = ((number + 1) * self.sync_every // self.fragments for number in range(self.fragments))
        return next((number for number, end in enumerate(ends) if end == within), None)

    def exchanged_in_round(self) -> list[int]:
        """The fragments that take outer steps within a round, as often as they do."""
        behind = map(self.fragment_behind, range(1, self.round_steps))
        return [fragment for fragment in behind if fragment is not None] if self.streams else []

    def cut(self, units: Sequence[T]) -> list[Sequence[T]]:
        """The fragments of the units that are trained: neighbours, as many in each or one more."""
        ends = [len(units) * number // self.fragments for number in range(self.fragments + 1)]
        return [units[start:stop] for start, stop in pairwise(ends)]

    @property
    def states(self) -> int:
        """Number of states in fp32 that are kept for each element: θ, and b where there is momentum."""
        return 2 if self.momentum else 1

    @property
    def align(self) -> int:
        """Parameters and shards begin on multiples of so many elements: a block has one scale, wherever it lies."""
        return OUTER_BLOCKS.numel if self.traffic == "int8" else ALIGN

    def messages(self, numel: int, *, whole: bool = False) -> list[int]:
        """Elements of each message, for `numel` elements that a rank has a part of; a `whole` one has all."""
        most = numel if whole else MESSAGE_NUMEL
        return [min(most, numel - start) for start in range(0, numel, most)] if numel else []

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
