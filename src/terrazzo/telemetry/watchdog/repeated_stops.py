"""Ranks that somebody stops and lets go on, again and again: the run goes on, and as slowly as they do."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["RepeatedStops"]

_LOOKS = 80
"""Looks that are remembered: 20 s of them."""
_FEWEST = 40
_SHARE = 0.25
"""The share of the looks in which a rank was found stopped."""
_TIMES = 3
"""How often it was stopped anew in these looks: once may be somebody at a terminal."""


class RepeatedStops:
    """Which ranks were stopped in how many of the newest looks. Clean runs have none that is ever stopped alone."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._looks: dict[int, deque[bool]] = {rank: deque(maxlen=_LOOKS) for rank in ranks}
        self._named: set[int] = set()

    def forget(self) -> None:
        """What was seen so far is of another time: all were stopped, or the machine has slept."""
        for seen in self._looks.values():
            seen.clear()

    def look(self, states: Mapping[int, str]) -> Iterator[tuple[int, float]]:
        """Each rank that was stopped for much of the time, and the share of it; once, until it has been well again.

        Args:
            states: of ranks to look at: only what was seen of them counts, and only they are named.
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
