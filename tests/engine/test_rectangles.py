"""Rectangles of index spaces, against tensors that are cut and counted."""

from __future__ import annotations

import math
import time
from itertools import pairwise, product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.engine.layout import Range
from terrazzo.engine.rectangles import Rectangle, Runs, rectangles_of, tiling_problem, whole


@settings(deadline=None)  # in wall time, of a machine that others use
@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_a_flat_range_is_these_rectangles(sizes: list[int], data: st.DataObject) -> None:
    shape, numel = tuple(sizes), math.prod(sizes)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    values = torch.arange(numel).view(shape)
    parts = [values[box.within(whole(shape))].flatten() for box in rectangles_of(shape, start, stop)]
    assert torch.cat([torch.arange(0), *parts]).tolist() == list(range(start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@settings(deadline=None)  # in wall time, of a machine that others use
@given(st.lists(st.integers(1, 4), max_size=3), st.data())
def test_rectangles_tile_a_shape_exactly_when_each_element_is_in_one(sizes: list[int], data: st.DataObject) -> None:
    offsets = st.tuples(*(st.integers(0, size) for size in sizes))
    boxes = [
        Rectangle(first, tuple(data.draw(st.integers(0, size - at)) for size, at in zip(sizes, first, strict=True)))
        for first in data.draw(st.lists(offsets, max_size=3))
    ]
    if data.draw(st.booleans()) and sizes:  # else two that are enough would hardly come up
        cut = data.draw(st.integers(0, sizes[0]))
        boxes = [
            Rectangle((0,) * len(sizes), (cut, *sizes[1:])),
            Rectangle((cut, *[0] * (len(sizes) - 1)), (sizes[0] - cut, *sizes[1:])),
        ]
    counts = torch.zeros(sizes, dtype=torch.long)
    for box in boxes:
        counts[box.within(whole(sizes))] += 1
    assert (tiling_problem(tuple(sizes), boxes) is None) == bool((counts == 1).all())


@settings(deadline=None)  # in wall time, of a machine that others use
@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_runs_are_the_elements_of_a_box_in_as_few_pieces_as_there_are(sizes: list[int], data: st.DataObject) -> None:
    shape, numel = tuple(sizes), math.prod(sizes)
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    box = Rectangle(
        offsets, tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True))
    )
    wanted = torch.arange(numel).view(shape)[box.within(whole(shape))].flatten().tolist()
    runs = Runs(shape, box)
    assert runs.numel == len(wanted)
    found = [(before, part) for before, part in runs.inside(Range(0, numel))]
    assert [n for _, part in found for n in range(part.start, part.stop)] == wanted
    assert [before for before, _ in found] == [number * runs.length for number in range(runs.count)]
    assert len(found) == 1 + sum(b != a + 1 for a, b in pairwise(wanted)) if wanted else not found
    window = Range(*sorted(data.draw(st.integers(0, numel)) for _ in range(2)))
    for before, part in runs.inside(window):
        assert wanted[before : before + part.numel] == list(range(part.start, part.stop))
    inside = [n for _, part in runs.inside(window) for n in range(part.start, part.stop)]
    assert inside == [n for n in wanted if window.start <= n < window.stop]


def test_a_part_is_moved_and_shown() -> None:
    outer, box = Rectangle((4, 6), (8, 8)), Rectangle((5, 6), (2, 3))
    assert box.relative_to(outer) == Rectangle((1, 0), (2, 3))
    assert box.relative_to(outer).placed_in(outer) == box
    assert str(box) == "[2, 3] at [5, 6]"


def test_many_parts_are_compared_in_little_time() -> None:
    """What a forged description may have: cut along every dim, so that each part reaches as far as all others."""
    grid = [Rectangle((a, b, c, d), (1, 1, 1, 1)) for a, b, c, d in product(range(12), repeat=4)]
    before = time.process_time()
    assert tiling_problem((12,) * 4, grid) is None
    assert tiling_problem((12,) * 4, [*grid[1:], grid[-1]]) == "its 20736 parts are not each of its elements once"
    corners = [Rectangle(offsets, (1,) * 12) for offsets in product(range(2), repeat=12)]
    assert tiling_problem((2,) * 12, [*corners, corners[0]]) == "its 4097 parts are not each of its elements once"
    assert time.process_time() - before < 5
