"""Which slots there are for the ranks of a run when some are lost or come back, and how many ranks there can be then.

A slot is a GPU, or on a CPU just a number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from terrazzo.config import Config
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput
from terrazzo.launch.machine import resolve_device
from terrazzo.messages import counted

__all__ = ["RankSlots", "slots_of"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class RankSlots:
    """The slots that are left.

    Args:
        numbers: the numbers of ranks that are allowed, in ascending order.
        seen: returns how many slots there are now.
        named: whether ranks must be told which devices to use (`CUDA_VISIBLE_DEVICES`), if not the first ones.
    """

    def __init__(self, numbers: Sequence[int], seen: Callable[[], int], *, named: bool) -> None:
        self._numbers, self._seen, self._named = numbers, seen, named
        self._there = seen()
        self._left = list(range(self._there))

    @property
    def ranks(self) -> int:
        """The largest number of ranks that is allowed on the slots that are left."""
        return max(number for number in self._numbers if number <= len(self._left))

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment in which each rank finds a remaining device under its own number."""
        used = self._left[: self.ranks]
        if not self._named or used == list(range(len(used))):
            return {}
        visible = os.environ.get(_VISIBLE)
        names = [str(number) for number in range(self._there)] if visible is None else visible.split(",")
        return {_VISIBLE: ",".join(names[number] for number in used)}

    def follow(self, rank: int | None) -> str:
        """Give up slots that are lost, and take those that have come; returns which in words, empty if there are none.

        Args:
            rank: the rank that has failed at its start again, whose slot is given up; None if there is none.

        Raises:
            BadInput: too few slots are left for the smallest number of ranks.
        """
        before, now = self.ranks, self._seen()
        if now != self._there:  # devices have new numbers, so that it is not known which of them were given up
            fewer = f"{counted(self._there - now, 'device')} of {self._there} cannot be seen any more"
            what = fewer if now < self._there else f"{counted(now, 'device')} can be seen in the place of {self._there}"
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
    """The slots of a run whose number of ranks may change; None if `launch.ranks` is one number."""
    if not isinstance(config.launch.ranks, str):
        return None
    cuda, numbers = resolve_device(config.launch) == "cuda", config.rank_numbers
    return RankSlots(numbers, devices.count if cuda else lambda: numbers[-1], named=cuda)
