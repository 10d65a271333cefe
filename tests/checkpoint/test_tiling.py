"""Whether rectangles are a tensor, against elements that are counted."""

from __future__ import annotations

import time
from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.checkpoint.format.tiling import tiling_problem
from terrazzo.engine.partition.rectangles import Rectangle, whole


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


def test_many_parts_are_compared_in_little_time() -> None:
    """What a forged description may have: cut along every dim, so that each part reaches as far as all others."""
    grid = [Rectangle((a, b, c, d), (1, 1, 1, 1)) for a, b, c, d in product(range(10), repeat=4)]
    before = time.process_time()
    assert tiling_problem((10,) * 4, grid) is None
    assert tiling_problem((10,) * 4, [*grid[1:], grid[-1]]) == "its 10000 parts are not each of its elements once"
    corners = [Rectangle(offsets, (1,) * 12) for offsets in product(range(2), repeat=12)]
    assert tiling_problem((2,) * 12, [*corners, corners[0]]) == "its 4097 parts are not each of its elements once"
    assert time.process_time() - before < 5
