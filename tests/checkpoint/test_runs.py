"""The flat ranges of a rectangle, against tensors that are cut and counted."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.checkpoint.format.runs import Runs
from terrazzo.engine.partition.rectangles import Rectangle, whole
from terrazzo.engine.plan.layout import Range


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
