"""Covers of grids: of all combinations of what a test is parametrized with, those that meet every pair of values.

A test marked `cover` runs over its cover in `make test`, and over the whole grid in `make test-long`: the other cases
are marked `long`, and those that are by themselves stay so. An axis is an argument of the test, or something of one:

    @pytest.mark.cover                     # any two values of two arguments meet
    @pytest.mark.cover(strength=1)         # any value comes up, where an axis has more of them than another in turns
    @pytest.mark.cover(plan=places)        # instead of `plan`, where its states lie
    @pytest.mark.cover(strength=1, turns=2, plan=places)  # every second of them, by the test's name
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any

import pytest

import terrazzo as tz

__all__ = ["cover", "in_turns", "leave_out_what_is_long", "mostly_long", "places", "turn_of"]


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


def turn_of(test: str, chosen: Sequence[int], turns: int) -> list[int]:
    """Every `turns`-th of them, beginning where the test's name says: between them tests take all."""
    return [*chosen[zlib.crc32(test.encode()) % turns :: turns]] or [*chosen]


def mostly_long(cases: Iterable[object], *short: object) -> list[Any]:
    """Every case, as parameters; all but the short ones are long. Raises: ValueError where a short one is no case."""
    cases = list(cases)
    if any(case not in cases for case in short):
        raise ValueError(f"not all of {short} are among the cases")
    return [
        pytest.param(*(case if type(case) is tuple else (case,)), marks=[] if case in short else [pytest.mark.long])
        for case in cases
    ]


def _met(case: Mapping[str, str], strength: int) -> frozenset[object]:
    return frozenset(combinations(sorted(case.items()), min(strength, len(case))))


@functools.cache
def places(plan: str | tz.Plan) -> Mapping[str, object]:
    """The place of each state."""
    rows = tz.Plan.named(plan) if isinstance(plan, str) else plan
    return MappingProxyType({state: str(getattr(rows, state)) for state in ("weight", "between", "grad", "optim")})


def leave_out_what_is_long(metafunc: pytest.Metafunc) -> None:
    """Mark the cases that no cover needs; where long ones do not run, most are not even made into tests."""
    calls = metafunc._calls
    if marker := metafunc.definition.get_closest_marker("cover"):
        taken = dict(marker.kwargs)
        strength, turns = taken.pop("strength", 2), taken.pop("turns", 1)
        among = [call for call in calls if not any(mark.name == "long" for mark in call.marks)]
        chosen = cover([_axes(call.params, taken) for call in among], strength)
        chosen = turn_of(metafunc.definition.name, chosen, turns)
        for index, call in enumerate(among):
            if index not in chosen:
                call.marks.append(pytest.mark.long.mark)
    if "not long" in metafunc.config.getoption("markexpr"):
        short = [call for call in calls if not any(mark.name == "long" for mark in call.marks)]
        metafunc._calls = short or calls[:1]  # of a test without cases pytest makes one without arguments


def _axes(params: Mapping[str, object], taken: Mapping[str, Any]) -> dict[str, object]:
    """The values of a case; `taken` gives, for some arguments, a function from its value to axes and theirs."""
    axes: dict[str, object] = {}
    for argument, value in params.items():
        own = taken[argument](value) if argument in taken else {"": value}
        axes |= {f"{argument} {axis}": part for axis, part in own.items()}
    return axes
