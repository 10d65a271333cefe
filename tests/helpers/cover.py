"""A pairwise cover of a grid: any two values of two axes that meet in some case meet in a chosen one.

A test marked `pairwise` runs over such a cover in `make test` and over the whole grid in `make test-long`. What is left
out are cases marked `long`. An axis is an argument of the test, or attributes of one:

    @pytest.mark.pairwise                        # each argument is an axis
    @pytest.mark.pairwise(case="plan ranks")     # instead of `case`, two of its attributes are
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations_with_replacement

import pytest

__all__ = ["cover", "mark_what_is_long"]


def cover(cases: Sequence[Mapping[str, object]]) -> list[int]:
    """Indices of the cases to choose; of equals the first. A case maps axes to values, which compare by their `repr`."""
    pairs = [_pairs({axis: repr(value) for axis, value in case.items()}) for case in cases]
    left, chosen = frozenset[tuple[object, object]]().union(*pairs), []
    while left:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & left))
        chosen.append(best)
        left -= pairs[best]
    return sorted(chosen)


def _pairs(case: Mapping[str, str]) -> frozenset[tuple[object, object]]:
    return frozenset(combinations_with_replacement(sorted(case.items()), 2))  # with itself: there may be one axis


def mark_what_is_long(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of pairwise tests that no cover needs."""
    grids = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and "pairwise" in item.keywords:
            grids[item.path, item.originalname].append(item)
    for grid in grids.values():
        chosen = set(cover([_axes(item) for item in grid]))
        for index, item in enumerate(grid):
            if index not in chosen:
                item.add_marker("long")


def _axes(item: pytest.Function) -> dict[str, object]:
    marker = item.get_closest_marker("pairwise")
    assert marker is not None
    split = {argument: attributes.split() for argument, attributes in marker.kwargs.items()}
    axes: dict[str, object] = {}
    for argument, index in item.callspec.indices.items():
        if argument in split:
            value = item.callspec.params[argument]
            axes |= {f"{argument}.{attribute}": getattr(value, attribute) for attribute in split[argument]}
        else:
            axes[argument] = index
    return axes
