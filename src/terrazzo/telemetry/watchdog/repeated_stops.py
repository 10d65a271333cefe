"""Ranks that something stops and continues over and over (SIGSTOP, SIGCONT): the whole run is as slow as they are."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["RepeatedStops"]

_LOOKS = 80
"""Looks that are remembered: 20 s of them."""
_FEWEST = 40
"""Looks before a rank is named."""
_SHARE = 0.25
"""A rank is named that was stopped in this share of the looks."""
_TIMES = 3
"""And that was stopped anew so often in them: once may be somebody at a terminal."""


class RepeatedStops:
    """Remembers in which of the newest looks each rank was stopped."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._looks: dict[int, deque[bool]] = {rank: deque(maxlen=_LOOKS) for rank in ranks}
        self._named: set[int] = set()

    def forget(self) -> None:
        """Forget all looks: all ranks were stopped, or the machine was suspended."""
        for seen in self._looks.values():
            seen.clear()

    def look(self, states: Mapping[int, str]) -> Iterator[tuple[int, float]]:
        """Take a look; yields each rank that was stopped much of the time, with that share.

        A rank is named once, and again only after it has been well in all remembered looks.

        Args:
            states: of the processes of the ranks to look at, as in `/proc/PID/stat`.
        """
        for rank, state in states.items():
            seen = self._looks[rank]
            seen.append(state in ("T", "t"))
            share = sum(seen) / len(seen)
            if rank in self._named:
                if len(seen) == _LOOKS and not share:
                    self._named.remove(rank)
            elif len(seen) >= _FEWEST and share >= _SHARE and _begins(seen) >= _TIMES:
                self._named.add(rank)
                yield rank, share


def _begins(seen: deque[bool]) -> int:
    looks = list(seen)
    return sum(now and not before for before, now in itertools.pairwise(looks))
