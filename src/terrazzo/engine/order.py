"""The order in which units are gathered and reduced: agreed by all ranks, followed by each.

Collectives must be issued in the same order on every rank, whatever a rank's data makes it skip. So their order is a
program that all ranks share, and local execution only moves a cursor along it: a rank that skips a unit still takes
part in the unit's collectives when its cursor passes by. The program is the order of registration until the first
training forward has ended, and then what the ranks really ran, merged.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from terrazzo.engine.unit import Unit

__all__ = ["ENTER", "LEAVE", "LEAVE_FOR_GOOD", "Order", "Visit", "contains", "merge"]

ENTER, LEAVE_FOR_GOOD, LEAVE = range(3)
"""What happened to a unit in a forward: it began; it ended and no backward of it will come; it ended."""

Visit = tuple[int, int]
"""(unit index, one of the three events)"""


@dataclass(frozen=True)
class Order:
    """The program of a step.

    Attributes:
        forward: unit indices as their forwards begin, repeats included.
        backward: unit indices as their backwards begin.
        closes: for each position of `backward`, the units whose backward has ended when that position begins. Autograd
            runs ready nodes latest-created first, so once the backward of one unit begins, that of every unit whose
            forward began later, and whose own visits are over, has ended.
        remaining: the units that end only with the backward pass itself.
        agreed: whether the ranks have compared notes; until then units may still come in another order.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    closes: tuple[tuple[int, ...], ...] = field(repr=False)
    remaining: tuple[int, ...] = field(repr=False)
    agreed: bool = False

    @classmethod
    def of_visits(cls, visits: Iterable[Visit], units: int, agreed: bool) -> Order:
        """The program of one forward's visits. Units that it lacks come last, so that no rank can meet one unexpected.

        Args:
            units: how many units there are.
        """
        visits = list(visits)
        present = {unit for unit, _ in visits}
        missing = [unit for unit in range(units) if unit not in present]
        visits += [(unit, event) for unit in missing for event in (ENTER, LEAVE)]
        forward = [unit for unit, event in visits if event == ENTER]
        return cls._of(forward, [unit for unit, event in reversed(visits) if event == LEAVE], agreed)

    @classmethod
    def of_registration(cls, units: Sequence[Unit]) -> Order:
        """The program to expect before anything has run: units as registered, each around its inner units."""
        visits: list[Visit] = []
        inside: list[Unit] = []
        for unit in units:
            while inside and not contains(inside[-1], unit):
                visits.append((inside.pop().index, LEAVE))
            visits.append((unit.index, ENTER))
            inside.append(unit)
        visits += [(unit.index, LEAVE) for unit in reversed(inside)]
        return cls.of_visits(visits, len(units), agreed=False)

    @classmethod
    def _of(cls, forward: Sequence[int], backward: Sequence[int], agreed: bool) -> Order:
        first = {unit: position for position, unit in reversed(list(enumerate(forward)))}
        last_visit = {unit: position for position, unit in enumerate(backward)}
        closes: list[tuple[int, ...]] = []
        closed: set[int] = set()
        for position, unit in enumerate(backward):
            begun = dict.fromkeys(backward[:position])
            ended = [u for u in begun if u not in closed and last_visit[u] < position and first[u] > first[unit]]
            closed.update(ended)
            closes.append(tuple(ended))
        remaining = [unit for unit in dict.fromkeys([*backward, *reversed(forward)]) if unit not in closed]
        return cls(tuple(forward), tuple(backward), tuple(closes), tuple(remaining), agreed)


def contains(outer: Unit, inner: Unit) -> bool:
    """Whether the module of `inner` lies inside that of `outer`."""
    return outer.is_root or inner.name.startswith(outer.name + ".")


def merge(ranks: Sequence[Sequence[Visit]]) -> list[Visit] | None:
    """One list that every rank's visits are a subsequence of, or None if two ranks ran units in opposite orders.

    The n-th begin and the n-th end of a unit count as the same on every rank that has them; a backward will come if any
    rank expects one.
    """
    chains = [_steps(visits) for visits in ranks]
    followers: dict[_Step, set[_Step]] = defaultdict(set)
    for chain in chains:
        for before, after in itertools.pairwise(chain):
            followers[before].add(after)
    waiting = Counter(after for afters in followers.values() for after in afters)
    rank_of = {step: (position, rank) for rank, chain in enumerate(chains) for position, step in enumerate(chain)}
    ready = [(place, step) for step, place in rank_of.items() if not waiting[step]]
    heapq.heapify(ready)
    merged: list[_Step] = []
    while ready:
        _, step = heapq.heappop(ready)
        merged.append(step)
        for after in followers[step]:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, (rank_of[after], after))
    if len(merged) < len(rank_of):
        return None
    events = {step: max(chain[step] for chain in chains if step in chain) for step in merged}
    return [(unit, event) for (unit, _, _), event in events.items()]


_Step = tuple[int, bool, int]
"""(unit index, whether it ends, how many times before)"""


def _steps(visits: Sequence[Visit]) -> dict[_Step, int]:
    """The events of one rank under names that mean the same on every rank, in order."""
    seen: Counter[tuple[int, bool]] = Counter()
    steps = {}
    for unit, event in visits:
        kind = (unit, event != ENTER)
        steps[(*kind, seen[kind])] = event
        seen[kind] += 1
    return steps
