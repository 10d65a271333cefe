"""What `optimizer.state` has in the place of states per element that rest elsewhere."""

from __future__ import annotations

from typing import Self

import torch

from terrazzo.engine.buckets.parameters.placeholder import Placeholder

__all__ = ["StateIn8Bits", "StateOnNvme", "StatePlaceholder"]


class StatePlaceholder(Placeholder):
    """Stand-in in `optimizer.state` for a state per element that rests elsewhere: on `meta`, without memory."""

    @classmethod
    def of(cls, numel: int, dtype: torch.dtype, key: str) -> Self:
        """Make one for a segment of `numel` elements, under the optimizer's own `key`."""
        return cls.blank(torch.empty(numel, dtype=dtype, device="meta"), key)


class StateOnNvme(StatePlaceholder):
    """Stand-in for a state that rests on `nvme`."""

    def _refusal(self) -> str:
        return (
            f"{self.terrazzo_note.name!r}, which the optimizer keeps on nvme: it cannot be read or "
            "changed by hand. Place it in host memory, as plan 'zero3@cpu' does, or load a checkpoint without "
            "the optimizer's state to begin anew."
        )


class StateIn8Bits(StatePlaceholder):
    """Stand-in for a state that rests in blocks of 8-bit codes."""

    def _refusal(self) -> str:
        return (
            f"{self.terrazzo_note.name!r}, which the optimizer keeps in 8 bits: it cannot be read or changed by "
            "hand. Read it in optimizer.state_dict(), set it with optimizer.load_state_dict, or leave out 'moments' of "
            "the precision, which keeps it in fp32."
        )
