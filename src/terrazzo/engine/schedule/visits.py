"""Visits: the units that a rank's forward ran, as it noted them, and one list of those of all ranks."""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

__all__ = ["Event", "Visit", "merge"]


class Event(enum.IntEnum):
    """Event of a unit in a forward: it began; it ended, and no backward of it will come; it ended, and one will."""

    ENTER = 0
    LEAVE_FOR_GOOD = 1
    LEAVE = 2


Visit = tuple[int, Event]
"""(unit index, what happened)"""


def merge(ranks: Sequence[Sequence[Visit]]) -> list[Visit] | None:
    """Return one list that every rank's visits are a subsequence of; None if two ranks ran units in opposite orders.

    The n-th begin and the n-th end of a unit count as the same on every rank that has them; a backward will come if any
    rank expects one.
    """
    last_with = {tuple(visits): rank for rank, visits in enumerate(ranks)}  # most ranks run the same
    distinct = sorted(last_with, key=last_with.__getitem__)
    if len(distinct) == 1:
        return list(distinct[0])
    chains = [_steps(visits) for visits in distinct]
    followers: dict[_Step, set[_Step]] = defaultdict(set)
    for chain in chains:
        for before, after in itertools.pairwise(chain):
            followers[before].add(after)
    waiting = Counter(after for afters in followers.values() for after in afters)
    turn_of = {step: (position, rank) for rank, chain in enumerate(chains) for position, step in enumerate(chain)}
    ready = [(turn, step) for step, turn in turn_of.items() if not waiting[step]]
    heapq.heapify(ready)
    merged: list[_Step] = []
    while ready:
        _, step = heapq.heappop(ready)
        merged.append(step)
        for after in followers[step]:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, (turn_of[after], after))
    if len(merged) < len(turn_of):
        return None
    events = {step: max(chain[step] for chain in chains if step in chain) for step in merged}
    return [(unit, event) for (unit, _, _), event in events.items()]


_Step = tuple[int, bool, int]
"""(unit index, whether it ends, how many times before)"""


def _steps(visits: Sequence[Visit]) -> dict[_Step, Event]:
    """The events of one rank under names that mean the same on every rank, in order."""
    seen: Counter[tuple[int, bool]] = Counter()
    steps = {}
    for unit, event in visits:
        kind = (unit, event != Event.ENTER)
        steps[(*kind, seen[kind])] = event
        seen[kind] += 1
    return steps
