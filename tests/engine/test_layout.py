"""The flat index space: slots, padding, and the ranges that cuts leave."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.engine.plan.layout import ALIGN, Layout, Range, round_up, share

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)
AXES = st.lists(st.integers(1, 5), max_size=3)


def _layout(shapes: list[tuple[int, ...]], shards: int) -> Layout:
    return Layout.of([((f"p{i}",), shape) for i, shape in enumerate(shapes)], shards)


def _positions(sizes: list[int]) -> list[list[tuple[int, int]]]:
    """The cuts of every rank of a mesh with these axis sizes, first axis outermost."""
    cuts: list[list[tuple[int, int]]] = [[]]
    for parts in sizes:
        cuts = [[*before, (index, parts)] for before in cuts for index in range(parts)]
    return cuts


@given(SHAPES, AXES)
def test_shares_tile_the_space_without_gap_or_overlap(shapes: list[tuple[int, ...]], sizes: list[int]) -> None:
    layout = _layout(shapes, math.prod(sizes))
    shares = [share(layout.whole, cuts) for cuts in _positions(sizes)]
    assert [part.start for part in shares] == [0, *(part.stop for part in shares[:-1])]
    assert shares[-1].stop == layout.numel
    assert len({part.numel for part in shares}) == 1


@given(SHAPES, AXES)
def test_a_share_over_more_axes_lies_inside_the_share_over_a_prefix(
    shapes: list[tuple[int, ...]], sizes: list[int]
) -> None:
    layout = _layout(shapes, math.prod(sizes))
    for cuts in _positions(sizes):
        for length in range(len(cuts)):
            outer, inner = share(layout.whole, cuts[:length]), share(layout.whole, cuts)
            assert outer.intersect(inner) == inner


@given(SHAPES, st.integers(1, 64))
def test_slots_are_in_order_aligned_and_hold_their_elements(shapes: list[tuple[int, ...]], shards: int) -> None:
    layout = _layout(shapes, shards)
    end = 0
    for slot, shape in zip(layout.slots, shapes, strict=True):
        assert slot.shape == shape
        assert slot.numel == math.prod(shape)
        assert slot.offset == end
        assert slot.offset % ALIGN == 0
        end = slot.padded.stop
    assert end <= layout.numel


@given(SHAPES, st.integers(1, 64))
def test_padding_is_less_than_a_line_per_slot_and_a_line_per_shard(shapes: list[tuple[int, ...]], shards: int) -> None:
    layout = _layout(shapes, shards)
    slots = [round_up(math.prod(shape), ALIGN) for shape in shapes]
    assert layout.numel - sum(slots) < ALIGN * shards
    assert all(padded - math.prod(shape) < ALIGN for padded, shape in zip(slots, shapes, strict=True))
    assert layout.numel % (ALIGN * shards) == 0


@given(SHAPES, st.integers(1, 9))
def test_slots_and_gaps_cover_every_element_once(shapes: list[tuple[int, ...]], shards: int) -> None:
    layout = _layout(shapes, shards)
    covered = [slot.range for slot in layout.slots if slot.numel] + layout.gaps
    elements = sorted(element for part in covered for element in range(part.start, part.stop))
    assert elements == list(range(layout.numel))


def test_a_worked_example() -> None:
    layout = Layout.of([(("a",), (3, 5)), (("b", "tied"), ()), (("c",), (0, 4)), (("d",), (65,))], shards=3)
    assert [slot.offset for slot in layout.slots] == [0, 64, 128, 128]
    assert [slot.numel for slot in layout.slots] == [15, 1, 0, 65]
    assert layout.slots[1].name == "b"
    assert layout.numel == 384  # 256 used, and the next multiple of 3 * 64
    assert layout.gaps == [Range(15, 64), Range(65, 128), Range(193, 256), Range(256, 384)]
    assert share(layout.whole, [(1, 3)]) == Range(128, 256)


def test_the_first_cut_is_the_outermost() -> None:
    whole = Range(0, 8 * ALIGN)
    assert share(whole, [(1, 2), (0, 4)]) == Range(4 * ALIGN, 5 * ALIGN)
    assert share(whole, [(0, 4), (1, 2)]) == Range(1 * ALIGN, 2 * ALIGN)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_an_intersection_holds_the_common_elements(a: int, b: int, c: int, d: int) -> None:
    one, other = Range(min(a, b), max(a, b)), Range(min(c, d), max(c, d))
    common = set(range(one.start, one.stop)) & set(range(other.start, other.stop))
    found = one.intersect(other)
    assert set(range(found.start, found.stop)) == common
    assert found.numel == len(common)


def test_a_range_becomes_a_slice_of_what_holds_it() -> None:
    assert list(range(100, 200))[Range(120, 125).within(Range(100, 200))] == [120, 121, 122, 123, 124]


def test_a_cut_that_does_not_divide_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="do not divide"):
        share(Range(0, 10), [(0, 3)])
