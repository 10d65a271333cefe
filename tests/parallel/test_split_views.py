"""Views of tensors of which ranks have a part of the channels: every view, held against the same one of the whole."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from terrazzo.parallel.tensor.channels.cut_dim import ChannelCut, HeadCounts, Mixed
from terrazzo.parallel.tensor.channels.split_views import through_view

BATCH, TOKENS = 5, 4


@dataclass(frozen=True)
class Setup:
    """`heads` of `width` channels over `ranks`; `known`: the plan says how many heads there are."""

    heads: int
    width: int
    ranks: int
    known: bool
    layout: str

    @functools.cached_property
    def whole(self) -> Tensor:
        shape = {
            "channels": (BATCH, TOKENS, self.heads * self.width),
            "rows": (BATCH * TOKENS, self.heads * self.width),
            "heads-behind": (BATCH, TOKENS, self.heads, self.width),
            "heads-first": (BATCH, self.heads, TOKENS, self.width),
            "flat-heads": (BATCH * self.heads, TOKENS, self.width),
        }[self.layout]
        return torch.arange(math.prod(shape)).view(shape)

    @functools.cached_property
    def parts(self) -> list[Tensor]:
        dim = self.cut.dim
        if self.layout == "flat-heads":
            apart = self.whole.unflatten(0, (BATCH, self.heads)).chunk(self.ranks, 1)
            return [each.flatten(0, 1).contiguous() for each in apart]
        return [each.contiguous() for each in self.whole.chunk(self.ranks, dim)]

    @functools.cached_property
    def cut(self) -> ChannelCut:
        here, counts = self.heads // self.ranks, HeadCounts(self.ranks)
        heads = here if self.known or "heads" in self.layout else None
        if heads:
            counts.here.add(here)
        dim, size, runs = {
            "channels": (2, here * self.width, 1),
            "rows": (1, here * self.width, 1),
            "heads-behind": (2, here, 1),
            "heads-first": (1, here, 1),
            "flat-heads": (0, here, BATCH),
        }[self.layout]
        return ChannelCut("up", dim, (size,) * runs, (heads,) * runs, counts)


SETUPS = [
    Setup(heads, width, ranks, known, layout)
    for heads, width, ranks in ((6, 14, 2), (2, 7, 2), (6, 3, 3))
    for known in (False, True)
    for layout in ("channels", "rows", "heads-behind", "heads-first", "flat-heads")
    if known or "heads" not in layout
]


def together(parts: Sequence[Tensor], cut: ChannelCut) -> Tensor:
    """What the cut says that ranks have of the whole."""
    runs = zip(*(each.split(list(cut.sizes), cut.dim) for each in parts), strict=True)
    return torch.cat([torch.cat(run, cut.dim) for run in runs], cut.dim)


def viewed(values: Tensor, sizes: Sequence[int]) -> Tensor | None:
    rest, left = divmod(values.numel(), abs(math.prod(sizes)))
    return None if left or (rest > 1 and -1 not in sizes) else values.view(sizes)


def with_one_inferred(sizes: Sequence[int]) -> Iterator[list[int]]:
    yield [*sizes]
    for place in range(len(sizes)):
        yield [*sizes[:place], -1, *sizes[place + 1 :]]


def found(setup: Setup, sizes: Sequence[int], own: Sequence[Tensor]) -> list[ChannelCut] | None:
    """None: refused."""
    inferred = [*sizes].index(-1) if -1 in sizes else None
    try:
        return through_view(setup.cut, setup.parts[0].shape, own[0].shape, inferred)
    except Mixed:
        return None


def is_right(setup: Setup, sizes: Sequence[int], of_whole: Sequence[int]) -> bool | None:
    """Whether a view that is not refused is that of the whole; None: torch refuses one of them, or the watch it."""
    whole, own = viewed(setup.whole, of_whole), [viewed(each, sizes) for each in setup.parts]
    made = [each for each in own if each is not None]
    if whole is None or len(made) < len(own) or made[0].shape == setup.parts[0].shape:
        return None
    if (cuts := found(setup, sizes, made)) is None:
        return None
    parts = [together(made, each) for each in cuts]
    return any(each.shape == whole.shape and torch.equal(each, whole) for each in parts)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_view_of_sizes_of_the_whole_is_that_of_the_whole_or_refused(setup: Setup) -> None:
    heads, here, width = setup.heads, setup.heads // setup.ranks, setup.width
    numbers = {BATCH, TOKENS, heads, width, heads * width, BATCH * TOKENS, BATCH * heads, 2, TOKENS // 2, width // 2}
    numbers -= {here, here * width, 0}  # a number that this rank's happens to be is taken for it
    tried = 0
    for count in (1, 2, 3, 4):
        for sizes in itertools.product(sorted(numbers), repeat=count - 1):
            for place in range(count):
                view = [*sizes[:place], -1, *sizes[place:]]
                if (right := is_right(setup, view, view)) is not None:
                    tried += 1
                    assert right, view
    assert tried


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_view_by_a_size_of_the_rank_is_that_of_the_whole_or_refused(setup: Setup) -> None:
    here, width = setup.heads // setup.ranks, setup.width
    sizes_here = {here, here * width, TOKENS * here, BATCH * here}
    kept = {BATCH, TOKENS, width, BATCH * TOKENS}
    for count in (1, 2, 3, 4):
        for sizes in itertools.product(sorted(kept), repeat=count - 1):
            for size, place in itertools.product(sorted(sizes_here), range(count)):
                for each in with_one_inferred([*sizes[:place], size, *sizes[place:]]):
                    of_whole = [number * setup.ranks if at == place else number for at, number in enumerate(each)]
                    if each[place] != -1 and is_side_by_side(setup, each, of_whole, place):
                        assert is_right(setup, each, of_whole) in (True, None), each


def is_side_by_side(setup: Setup, sizes: Sequence[int], of_whole: Sequence[int], dim: int) -> bool:
    """Whether a dim of the whole view is that of the ranks' views, run by run, each of one position."""
    whole, own = viewed(setup.whole, of_whole), [viewed(each, sizes) for each in setup.parts]
    if (
        [*sizes[:2]] == [TOKENS, BATCH]
        or whole is None
        or any(each is None for each in own)
        or (-1 in sizes and own[0].shape[[*sizes].index(-1)] == 1)
    ):
        return False  # -1 for what is one on all ranks, and on one, is not followed beside sizes of the rank
    return any(
        own[0].shape[dim] % runs == 0
        and torch.equal(
            torch.cat([each.unflatten(dim, (runs, -1)) for each in own], dim + 1).flatten(dim, dim + 1), whole
        )
        for runs in (1, BATCH)
    )


def test_channels_of_a_head_of_the_whole_over_those_of_a_rank_are_refused() -> None:
    setup = Setup(6, 14, 2, True, "channels")
    view = (BATCH, TOKENS, -1, setup.parts[0].shape[-1] // setup.heads)
    with pytest.raises(Mixed, match="makes heads"):
        through_view(setup.cut, setup.parts[0].shape, setup.parts[0].view(view).shape, 2)


@pytest.mark.parametrize("setup", [each for each in SETUPS if each.layout in ("channels", "rows")], ids=str)
def test_a_size_of_the_rank_is_not_taken_for_its_own_beside_what_may_be_more_of_the_whole(setup: Setup) -> None:
    """On the whole, -1 behind is as many as ranks; here it is one."""
    shape = setup.parts[0].shape
    with pytest.raises(Mixed, match="makes heads"):
        through_view(setup.cut, shape, (*shape, 1), len(shape))


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_views_that_models_write_are_followed(setup: Setup) -> None:
    here, width = setup.heads // setup.ranks, setup.width
    views = {
        "channels": [(BATCH, TOKENS, -1, width), (-1, here * width), (BATCH, TOKENS, -1), (-1, width)],
        "rows": [(BATCH, TOKENS, -1), (-1, width), (BATCH, -1, here * width), (BATCH, TOKENS, -1, width)],
        "heads-behind": [(BATCH, TOKENS, -1), (BATCH, TOKENS, here * width), (-1, width), (-1, here, width)],
        "heads-first": [(BATCH * here, TOKENS, width), (-1, TOKENS, width), (BATCH, here, -1)],
        "flat-heads": [(BATCH, here, TOKENS, width), (BATCH, -1, TOKENS, width), (-1, here, TOKENS, width)],
    }[setup.layout]
    if setup.known and setup.layout in ("channels", "rows"):
        views += [(BATCH, TOKENS, here, width), (BATCH, TOKENS, here, -1), (BATCH, -1, here, width)]
    for view in views:
        own = [each.view(view) for each in setup.parts]
        assert found(setup, view, own), view


def test_heads_that_a_matrix_has_elsewhere_group_those_of_another() -> None:
    counts = HeadCounts(2, {1, 4})
    queries = ChannelCut("q", 1, (4,), (4,), counts)
    assert {1, 2} <= {each.dim for each in through_view(queries, (5, 4, 3, 7), (5, 1, 4, 3, 7), 2)}
    with pytest.raises(Mixed, match="heads"):
        through_view(queries, (5, 4, 3, 7), (5, 2, 2, 3, 7), 2)  # two key heads are those of both ranks
