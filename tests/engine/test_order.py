"""The program that ranks agree on: what it says of when a unit has ended, and how ranks' own lists become one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.engine.schedule.order import Order
from terrazzo.engine.schedule.visits import Event, Visit, merge
from tests.helpers.examples import examples

UNITS = 6


def units(count: int) -> Any:
    """As many, side by side."""
    return [SimpleNamespace(index=index, name=str(index), is_root=False) for index in range(count)]


def slow_closes(forward: Sequence[int], backward: Sequence[int]) -> list[set[int]]:
    """From the definition, for each position of backward: began earlier, no visit to come, later in forward."""
    closed: set[int] = set()
    closes = []
    for position, unit in enumerate(backward):
        begun = set(backward[:position]) - set(backward[position:]) - closed
        ended = {other for other in begun if forward.index(other) > forward.index(unit)}
        closed |= ended
        closes.append(ended)
    return closes


@st.composite
def programs(draw: st.DrawFn) -> list[Visit]:
    """Visits of one forward: units nested, repeated, skipped, and some without a backward."""
    visits: list[Visit] = []
    inside: list[int] = []
    for _ in range(draw(st.integers(0, 14))):
        if inside and draw(st.booleans()):
            visits.append((inside.pop(), draw(st.sampled_from([Event.LEAVE, Event.LEAVE, Event.LEAVE_FOR_GOOD]))))
        else:
            unit = draw(st.integers(0, UNITS - 1))
            visits.append((unit, Event.ENTER))
            inside.append(unit)
    return visits + [(unit, Event.LEAVE) for unit in reversed(inside)]


@given(programs())
@settings(max_examples=examples(150))
def test_units_end_when_the_definition_says_so(visits: list[Visit]) -> None:
    order = Order.of_visits(visits, units(UNITS), agreed=True)
    assert [set(ended) for ended in order.closes] == slow_closes(order.forward, order.backward)
    for ended in order.closes:
        assert list(ended) == sorted(ended, key=order.backward.index), "in the order in which their backwards began"
    closed = {unit for ended in order.closes for unit in ended}
    assert set(order.closes_last) == set(range(UNITS)) - closed
    assert len(order.closes_last) == UNITS - len(closed)


def slow_merge(ranks: Sequence[Sequence[Visit]]) -> list[Visit] | None:
    """From the definition: again and again the step that nothing precedes, earliest on the last rank that has it."""
    chains = []
    for visits in ranks:
        steps = [(unit, event != Event.ENTER) for unit, event in visits]
        chains.append([(*step, steps[:place].count(step)) for place, step in enumerate(steps)])
    events = {step: 0 for chain in chains for step in chain}
    for chain, visits in zip(chains, ranks, strict=True):
        for step, (_, event) in zip(chain, visits, strict=True):
            events[step] = max(events[step], event)
    place = {step: (position, rank) for rank, chain in enumerate(chains) for position, step in enumerate(chain)}
    before = {pair for chain in chains for pair in pairwise(chain)}
    merged: list[tuple[int, bool, int]] = []
    while len(merged) < len(events):
        left = events.keys() - set(merged)
        free = [step for step in left if not any((other, step) in before for other in left)]
        if not free:
            return None
        merged.append(min(free, key=place.__getitem__))
    return [(step[0], events[step]) for step in merged]


@given(st.lists(programs(), min_size=1, max_size=3), st.data())
@settings(max_examples=examples(150))
def test_ranks_lists_merge_as_by_the_definition(distinct: list[list[Visit]], data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.sampled_from(distinct), min_size=1, max_size=6))
    assert merge(ranks) == slow_merge(ranks)


@given(programs(), st.data())
@settings(max_examples=examples(150))
def test_ranks_that_skip_units_of_one_program_merge(program: list[Visit], data: st.DataObject) -> None:
    ranks = []
    for _ in range(data.draw(st.integers(1, 4))):
        skipped = data.draw(st.sets(st.integers(0, UNITS - 1)))
        ranks.append([visit for visit in program if visit[0] not in skipped])
    merged = merge(ranks)
    assert merged is not None
    assert merged == slow_merge(ranks)


def test_equal_lists_merge_at_once() -> None:
    """No list is walked through: 1,024 ranks that run 15,000 units agree so after every changed order."""
    visits = [(Counted(unit), event) for unit in range(500) for event in (Event.ENTER, Event.LEAVE)]
    Counted.hashes = 0
    assert merge([visits] * 100) == visits
    assert Counted.hashes <= 101 * len(visits), "each list is looked at once, and nothing is built from it"


class Counted(int):
    """A number that counts how often it is looked up."""

    hashes = 0

    def __hash__(self) -> int:
        Counted.hashes += 1
        return int.__hash__(self)


@pytest.mark.parametrize("nested", [False, True], ids=["one after the other", "each in the one before"])
def test_programs_are_linear_in_units(nested: bool) -> None:
    def lookups(count: int) -> int:
        numbers = [Counted(unit) for unit in range(count)]
        visits = [(unit, event) for unit in numbers for event in (Event.ENTER, Event.LEAVE)]
        if nested:
            visits = [(unit, Event.ENTER) for unit in numbers] + [(unit, Event.LEAVE) for unit in reversed(numbers)]
        every = units(count)
        Counted.hashes = 0
        Order.of_visits(visits, every, agreed=True)
        return Counted.hashes

    assert lookups(4000) < 5 * lookups(1000) < 200 * 1000


def test_what_is_recomputed_together_is_gathered_at_once() -> None:
    ran = [(unit, event) for unit in (0, 1, 2, 4, 5) for event in (Event.ENTER, Event.LEAVE)]
    order = Order.of_visits(ran, units(UNITS), agreed=True, recomputed=[(1, 2), (2, 4)])
    assert order.backward == (5, 4, 3, 2, 1, 0)  # nobody ran 3, which keeps its place
    assert order.region_ends == (0, 4, 2, 4, 4, 5)
    assert Order.of_visits(ran, units(UNITS), agreed=True).region_ends == (0, 1, 2, 3, 4, 5)
