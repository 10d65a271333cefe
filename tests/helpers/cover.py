"""Covers of grids: of all combinations of what a test is parametrized with, those that meet every pair of values.

A test marked `cover` runs over its cover in `make test`, and over the whole grid in `make test-long`: the other cases
are marked `long`. An axis is an argument of the test, or something of one:

    @pytest.mark.cover                     # any two values of two arguments meet
    @pytest.mark.cover(strength=1)         # any value comes up, where an axis has more of them than another in turns
    @pytest.mark.cover(plan=places)        # instead of `plan`, where its states lie
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

import terrazzo as tz

__all__ = ["cover", "in_turns", "mark_what_is_long", "places"]


def cover(cases: Sequence[Mapping[str, object]], strength: int = 2) -> list[int]:
    """Indices of the cases to choose; of equals the first. A case maps axes to values, apart by `repr`."""
    met = [_met({axis: repr(value) for axis, value in case.items()}, strength) for case in cases]
    left, chosen = frozenset[object]().union(*met), []
    used = Counter[object]()

    def worth(index: int) -> tuple[int, int]:
        return len(met[index] & left), -sum(used[each] for each in met[index]) if strength == 1 else 0

    while left:
        best = max(range(len(cases)), key=worth)
        chosen.append(best)
        used.update(met[best])
        left -= met[best]
    return sorted(chosen)


def in_turns(cases: Iterable[Sequence[object]], values: Sequence[object]) -> list[Any]:
    """Every case with every value, as parameters; with all but one of them, by turns, it is long."""
    return [
        pytest.param(*case, value, marks=[pytest.mark.long] if index % len(values) != turn else [])
        for index, case in enumerate(cases)
        for turn, value in enumerate(values)
    ]


def _met(case: Mapping[str, str], strength: int) -> frozenset[object]:
    return frozenset(combinations(sorted(case.items()), min(strength, len(case))))


def places(plan: str | tz.Plan) -> dict[str, object]:
    """The place of each state."""
    rows = tz.Plan.named(plan) if isinstance(plan, str) else plan
    return {state: str(getattr(rows, state)) for state in ("weight", "between", "grad", "optim")}


def mark_what_is_long(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that no cover needs."""
    grids: dict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("cover"):
            grids[item.path, item.originalname].append(item)
    for grid in grids.values():
        marker = grid[0].get_closest_marker("cover")
        assert marker is not None
        taken = dict(marker.kwargs)
        strength = taken.pop("strength", 2)
        chosen = set(cover([_axes(item, taken) for item in grid], strength))
        for index, item in enumerate(grid):
            if index not in chosen:
                item.add_marker("long")


def _axes(item: pytest.Function, taken: Mapping[str, Any]) -> dict[str, object]:
    """The values of a case; `taken` gives, for some arguments, a function from its value to axes and theirs."""
    axes: dict[str, object] = {}
    for argument, value in item.callspec.params.items():
        own = taken[argument](value) if argument in taken else {"": value}
        axes |= {f"{argument} {axis}": part for axis, part in own.items()}
    return axes
