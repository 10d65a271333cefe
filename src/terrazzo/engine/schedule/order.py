"""The order in which units are gathered and reduced: agreed by all ranks, followed by each.

Collectives must be issued in the same order on every rank, whatever a rank's data makes it skip. So their order is a
program that all ranks share, and local execution only moves a cursor along it: a rank that skips a unit still takes
part in the unit's collectives when its cursor passes by. The program is the order of registration until the first
training forward has ended, and then what the ranks really ran, merged.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from terrazzo.engine.schedule.runnable import Runnable

__all__ = ["UNKNOWN_FORWARD", "Event", "Order", "Program", "Visit", "contains", "merge", "position_from"]


class Event(enum.IntEnum):
    """Event of a unit in a forward: it began; it ended, and no backward of it will come; it ended, and one will."""

    ENTER = 0
    LEAVE_FOR_GOOD = 1
    LEAVE = 2


Visit = tuple[int, Event]
"""(unit index, what happened)"""


@dataclass(frozen=True)
class Order:
    """The program of a step: the order of its collectives. Immutable, and equal on all ranks.

    Every unit is in `forward`, in `backward` where a backward of it comes, and in exactly one entry of `closes` or in
    `closes_last`. The schedule runs it; `Program.follow` makes the next one of what the ranks ran.

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
            one entry more for those that end after the last.
        region_ends: for each position of `backward`, the last one that is gathered at once with it, because both are
            recomputed in one region.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    closes: tuple[tuple[int, ...], ...] = field(repr=False)
    closes_last: tuple[int, ...] = field(repr=False)
    agreed: bool
    leaves: tuple[tuple[int, ...], ...] = field(repr=False)
    region_ends: tuple[int, ...] = field(repr=False)

    @classmethod
    def of_visits(
        cls,
        visits: Iterable[Visit],
        units: Sequence[Runnable],
        agreed: bool,
        recomputed: Iterable[tuple[int, int]] = (),
    ) -> Order:
        """The program of one forward's visits. Units that it lacks keep their place of registration: who runs one later
        finds it there.

        Args:
            units: all of them, in registration order.
            recomputed: pairs of units that are recomputed in one region.
        """
        visits = list(visits)
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
        )

    @classmethod
    def of_registration(cls, units: Sequence[Runnable]) -> Order:
        """The program to expect before anything has run: units as registered, each around its inner units."""
        return cls.of_visits([], units, agreed=False)


UNKNOWN_FORWARD = 0
"""Number in place of a forward's, which count from 1, where nobody knows whose backward it is."""
_PENDING = 64
"""Number of forwards of which is remembered what they ran, so that their backward releases weights unit by unit. In the
backward of an older one weights stay until it ends.
"""


class Program:
    """The order that all ranks follow, and what this rank has seen of the model since they compared.

    Args:
        units: all of them, in registration order, which is the program at first.

    Attributes:
        visits: what the last forward of the model ran.
        recomputed: pairs of units that this model recomputes in one region.
        strayed: whether a unit has come elsewhere than in the order, since the last agreement.
    """

    def __init__(self, units: Sequence[Runnable]) -> None:
        self._units, self.order = units, Order.of_registration(units)
        self._indices = {unit.index for unit in units}
        self.visits: list[Visit] = []
        self.recomputed: set[tuple[int, int]] = set()
        self.strayed = False
        self._begun: dict[int, dict[int, int]] = {}
        self._current: dict[int, int] | None = None  # of them, that of the forward that runs

    def begin_forward(self, number: int, differentiated: bool) -> None:
        """The forward of that number begins; numbers go up."""
        self.visits.clear()
        self._current = self._begun.setdefault(number, {}) if differentiated else None
        if len(self._begun) > _PENDING:
            del self._begun[min(self._begun)]

    def has(self, unit: int) -> bool:
        """Whether it is one of the units of this program."""
        return unit in self._indices

    def note(self, unit: int, event: Event) -> None:
        """Note a visit, in the forward that runs."""
        self.visits.append((unit, event))
        if event is Event.ENTER and self._current is not None:
            self._current.setdefault(unit, len(self._current))

    @property
    def last_forward(self) -> int:
        """The number of the last differentiated forward."""
        return max(self._begun, default=UNKNOWN_FORWARD)

    def is_over(self, unit: int, running: int, forward: int) -> bool:
        """Whether the backward of `unit` is known to be over on this rank, where that of `running`, if any, has begun.

        That follows from what this rank has run, in that very forward: it may have called units inside of others that
        the order has behind them.

        Args:
            forward: number of the forward whose backward this is, or `UNKNOWN_FORWARD`.
        """
        if (begun := self._begun.get(forward)) is None:
            return False
        return unit not in begun or begun[unit] > begun.get(running, len(begun))

    def join(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Note that each of these pairs of units is recomputed in one region."""
        self.recomputed.update(pairs)

    def stray(self) -> None:
        """Note that a unit has come elsewhere than in the order."""
        self.strayed = True

    def doubt(self) -> None:
        """Note that some rank has strayed: the ranks compare again after the next forward."""
        self.order = replace(self.order, agreed=False)

    def follow(self, visits: Sequence[Visit] | None) -> None:
        """Run `visits` from now on, on which the ranks have agreed; None: what they ran before."""
        if visits is not None:
            self.order = Order.of_visits(visits, self._units, agreed=True, recomputed=self.recomputed)
        self.strayed = False


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
    return (*leaves, tuple(since))


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
    rank_of = {step: (position, rank) for rank, chain in enumerate(chains) for position, step in enumerate(chain)}
    ready = [(rank, step) for step, rank in rank_of.items() if not waiting[step]]
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


def _steps(visits: Sequence[Visit]) -> dict[_Step, Event]:
    """The events of one rank under names that mean the same on every rank, in order."""
    seen: Counter[tuple[int, bool]] = Counter()
    steps = {}
    for unit, event in visits:
        kind = (unit, event != Event.ENTER)
        steps[(*kind, seen[kind])] = event
        seen[kind] += 1
    return steps


def position_from(start: int, units: Sequence[int], unit: int) -> int | None:
    """Position at which `unit` comes first in `units`, from `start` on; None where it does not come."""
    return next((position for position in range(start, len(units)) if units[position] == unit), None)
