"""The order in which units are gathered and reduced: agreed by all ranks, followed by each.

Collectives must be issued in the same order on every rank, whatever a rank's data makes it skip. So their order is
shared by all ranks, and local execution only moves a cursor along it: a rank that skips a unit still takes part in the
unit's collectives when its cursor passes by. It is the order of registration until the first training forward has
ended, and then that of what the ranks really ran, merged: see `program`.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from terrazzo.engine.schedule.runnable import Runnable
from terrazzo.engine.schedule.visits import Event, Visit

__all__ = ["Order", "contains", "position_from"]


@dataclass(frozen=True)
class Order:
    """The order of a step's collectives. Immutable, and equal on all ranks.

    Every unit is in `forward`, in `backward` where a backward of it comes, and in exactly one entry of `closes` or in
    `closes_last`. `Program.follow` makes the next one of what the ranks ran.

    Units 1 and 2, one after the other inside of the root, which is unit 0:

        forward   0, 1, 2         leaves       (), (), (1,), (2, 0)    1 is over as 2 begins, the others at the end
        backward  0, 2, 1         closes       (), (), (2,)            2 is over as 1 begins
                                  closes_last  0, 1                    only the end of backward tells that these are

    Attributes:
        forward: unit indices as their forwards begin, repeats included.
        backward: unit indices as their backwards begin.
        closes: for each position of `backward`, the units whose backward has ended when that position begins. Autograd
            runs ready nodes latest-created first, so once the backward of one unit begins, that of every unit whose
            forward began later, and whose own visits are over, has ended.
        closes_last: the units that end only with the backward pass itself.
        agreed: whether the ranks have compared notes.
        leaves: for each position of `forward`, the units whose forward ends between the position before and this one;
            one entry more for those that end after the last, or of which only a weight was read.
        region_ends: for each position of `backward`, the last one that is gathered at once with it, because both are
            recomputed in one region.
        visits: what the ranks ran, of which this is the order; none for the order of registration.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    closes: tuple[tuple[int, ...], ...] = field(repr=False)
    closes_last: tuple[int, ...] = field(repr=False)
    agreed: bool
    leaves: tuple[tuple[int, ...], ...] = field(repr=False)
    region_ends: tuple[int, ...] = field(repr=False)
    visits: tuple[Visit, ...] = field(repr=False)

    @classmethod
    def of_visits(
        cls,
        visits: Iterable[Visit],
        units: Sequence[Runnable],
        agreed: bool,
        recomputed: Iterable[tuple[int, int]] = (),
    ) -> Order:
        """The order of one forward's visits. Units that it lacks keep their place of registration: who runs one later
        finds it there.

        Args:
            units: all of them, in registration order.
            recomputed: pairs of units that are recomputed in one region.
        """
        visits = ran = list(visits)
        visited = {unit for unit, _ in visits}
        visits = _with_missing(visits, units)
        forward = [unit for unit, event in visits if event == Event.ENTER]
        backward = [unit for unit, event in reversed(visits) if event == Event.LEAVE]
        closes = _closes(forward, backward)
        closed = {unit for ended in closes for unit in ended}
        closes_last = [unit for unit in dict.fromkeys([*backward, *reversed(forward)]) if unit not in closed]
        return cls(
            tuple(forward),
            tuple(backward),
            tuple(closes),
            tuple(closes_last),
            agreed,
            _leaves(visits),
            _region_ends(backward, visited, recomputed),
            tuple(ran),
        )

    @classmethod
    def of_registration(cls, units: Sequence[Runnable]) -> Order:
        """The order to expect before anything has run: units as registered, each around its inner units."""
        return cls.of_visits([], units, agreed=False)


def _closes(forward: Sequence[int], backward: Sequence[int]) -> list[tuple[int, ...]]:
    """`closes` of an `Order`."""
    first = {unit: position for position, unit in reversed(list(enumerate(forward)))}
    begun = {unit: index for index, unit in enumerate(dict.fromkeys(backward))}
    last_visit = {unit: position for position, unit in enumerate(backward)}
    closes: list[tuple[int, ...]] = []
    over: list[tuple[int, int]] = []  # a heap of units whose visits are over, latest forward first
    for position, unit in enumerate(backward):
        ended = []
        while over and -over[0][0] > first[unit]:
            ended.append(heapq.heappop(over)[1])
        closes.append(tuple(sorted(ended, key=begun.__getitem__)))
        if last_visit[unit] == position:
            heapq.heappush(over, (-first[unit], unit))
    return closes


def _with_missing(visits: list[Visit], units: Sequence[Runnable]) -> list[Visit]:
    """`visits` with every unit in it: a missing one comes before the next unit beside it that is there, or else as the
    last thing inside the unit around it.
    """
    present = {unit for unit, _ in visits}
    if len(present) == len(units):
        return visits
    inside = _children(units)
    before: dict[int, deque[int]] = defaultdict(deque)  # missing units to come before the first begin of a unit
    at_end: dict[int, deque[int]] = defaultdict(deque)  # and before the last end of one; -1: at the very end
    for outer, children in inside.items():
        following: int | None = None
        for child in reversed(children):
            if child in present:
                following = child
            else:
                (at_end[outer] if following is None else before[following]).appendleft(child)

    def visits_of(unit: int) -> list[Visit]:
        inner = [visit for child in at_end.pop(unit, ()) for visit in visits_of(child)]
        return [(unit, Event.ENTER), *inner, (unit, Event.LEAVE)]

    last_end = {unit: position for position, (unit, event) in enumerate(visits) if event != Event.ENTER}
    complete: list[Visit] = []
    for position, (unit, event) in enumerate(visits):
        if event == Event.ENTER:
            missing = before.pop(unit, ())
        else:
            missing = at_end.pop(unit, ()) if last_end[unit] == position else ()
        complete += [visit for child in missing for visit in visits_of(child)]
        complete.append((unit, event))
    rest = [child for outer, missing in at_end.items() if outer in present or outer == -1 for child in missing]
    return complete + [visit for child in rest for visit in visits_of(child)]


def _children(units: Sequence[Runnable]) -> dict[int, list[int]]:
    """Units directly inside each unit, and inside none (-1), in registration order."""
    inside: dict[int, list[int]] = defaultdict(list)
    around: list[Runnable] = []
    for unit in units:
        while around and not contains(around[-1], unit):
            around.pop()
        inside[around[-1].index if around else -1].append(unit.index)
        around.append(unit)
    return inside


def _leaves(visits: Sequence[Visit]) -> tuple[tuple[int, ...], ...]:
    """`leaves` of an `Order`."""
    leaves: list[tuple[int, ...]] = []
    running: Counter[int] = Counter()
    since: list[int] = []
    for unit, event in visits:
        if event == Event.ENTER:
            leaves.append(tuple(since))
            since = []
            running[unit] += 1
        else:
            running[unit] -= 1
            if running[unit] <= 0:
                since.append(unit)
    read = (unit for unit, calls in running.items() if calls > 0)
    return (*leaves, (*since, *read))


def _region_ends(
    backward: Sequence[int], visited: Collection[int], pairs: Iterable[tuple[int, int]]
) -> tuple[int, ...]:
    """`region_ends` of an `Order`. Units that nobody has visited are part of what lies on both their sides."""
    region: dict[int, set[int]] = {}
    for pair in pairs:
        smaller, larger = sorted((region.setdefault(unit, {unit}) for unit in pair), key=len)
        larger |= smaller
        region.update(dict.fromkeys(smaller, larger))
    last = list(range(len(backward)))
    following: int | None = None
    for position in reversed(range(len(backward))):
        unit = backward[position]
        if unit in visited:
            if following is not None and backward[following] in region.get(unit, ()):
                last[position] = last[following]
            following = position
    return tuple(last)


def contains(outer: Runnable, inner: Runnable) -> bool:
    """Whether the module of `inner` lies inside that of `outer`."""
    return not outer.name or inner.name.startswith(outer.name + ".")


def position_from(start: int, units: Sequence[int], unit: int) -> int | None:
    """Position at which `unit` comes first in `units`, from `start` on; None where it does not come."""
    return next((position for position in range(start, len(units)) if units[position] == unit), None)
