"""Rectangles of index spaces, against tensors that are cut and counted."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.engine.partition.rectangles import Rectangle, rectangles_of, whole


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


def test_a_part_is_moved_and_shown() -> None:
    outer, box = Rectangle((4, 6), (8, 8)), Rectangle((5, 6), (2, 3))
    assert box.relative_to(outer) == Rectangle((1, 0), (2, 3))
    assert box.relative_to(outer).placed_in(outer) == box
    assert str(box) == "[2, 3] at [5, 6]"
