"""Where the ranks of a run may be, and how many there are then, when places are lost.

On GPUs a place is a device. On a CPU it is a number of a rank, which says how many there may be at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from terrazzo.config import Config
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput, counted
from terrazzo.train.launch.machine import resolve_device

__all__ = ["RankSlots", "slots_of"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class RankSlots:
    """The places that are left.

    Args:
        numbers: how many ranks there may be, in ascending order.
        seen: how many places there are now.
        named: ranks are told which of the devices are theirs, where these are not the first ones.
    """

    def __init__(self, numbers: Sequence[int], seen: Callable[[], int], *, named: bool) -> None:
        self._numbers, self._seen, self._named = numbers, seen, named
        self._there = seen()
        self._left = list(range(self._there))

    @property
    def ranks(self) -> int:
        """As many as may be on what is left."""
        return max(number for number in self._numbers if number <= len(self._left))

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment in which each rank finds a place that is left under its own number."""
        used = self._left[: self.ranks]
        if not self._named or used == list(range(len(used))):
            return {}
        visible = os.environ.get(_VISIBLE)
        names = [str(number) for number in range(self._there)] if visible is None else visible.split(",")
        return {_VISIBLE: ",".join(names[number] for number in used)}

    def lost(self, rank: int | None) -> str:
        """Give up what is lost, and say so; empty where nothing is.

        Args:
            rank: that has failed at its start again, with what it is at.

        Raises:
            BadInput: there may not be as few ranks as places are left.
        """
        before, now = self.ranks, self._seen()
        if now < self._there:  # who is left has a new number
            what = f"{counted(self._there - now, 'device')} of {self._there} cannot be seen any more"
            self._there, self._left = now, list(range(now))
        elif rank is not None:
            what = f"rank {rank} of {before} fails at its start again"
            what += f", on device {self._left[rank]}" if self._named else ""
            del self._left[rank]
        else:
            return ""
        if len(self._left) < self._numbers[0]:
            raise BadInput(f"{what}, and {counted(self._numbers[0], 'rank')} are the least (launch.ranks)")
        return what


def slots_of(config: Config) -> RankSlots | None:
    """Where ranks may be that may become fewer; None where their number is given."""
    if not isinstance(config.launch.ranks, str):
        return None
    cuda, numbers = resolve_device(config.launch) == "cuda", config.rank_numbers
    return RankSlots(numbers, devices.count if cuda else lambda: numbers[-1], named=cuda)
