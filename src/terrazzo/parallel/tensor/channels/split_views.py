"""What a view makes of the dim that ranks have in parts: heads of channels, and channels of heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from terrazzo.parallel.tensor.channels.cut_dim import ChannelCut, Mixed

__all__ = ["through_view"]

_HEADS = (
    "makes heads of channels, and does not say how many each rank has: view them as [..., -1, channels of a head], or "
    "give the number of all heads in the plan, as terrazzo.parallel.Colwise(heads=n),"
)


def through_view(cut: ChannelCut, old: Sequence[int], new: Sequence[int], inferred: int | None) -> ChannelCut | None:
    """The dim behind a view from one shape to another; None where either of two may be it.

    Args:
        inferred: the dim of the new shape whose size was given as -1.

    Raises:
        Mixed: on the whole tensor, the view would not have the ranks' parts side by side.
    """
    if 0 in old:
        return None
    before, after = _group(old, new, cut.dim)
    same_behind = len(old) - before.start == len(new) - after.start
    is_kept = len(before) == len(after) == 1 and (same_behind or len(new) >= len(old))
    if old[cut.dim] == 1 and inferred not in after and not is_kept:
        return None  # of one head here: with which of its neighbours all heads are made one dim is not known
    outer = math.prod(old[before.start : cut.dim])
    inner = math.prod(old[cut.dim + 1 : before.stop])
    sizes, heads = tuple(size * inner for size in cut.sizes) * outer, cut.heads * outer
    if len(after) == 1:
        return replace(cut, dim=after.start, sizes=sizes, heads=heads)
    if len(set(sizes)) > 1:
        raise Mixed(cut, "views parts of several matrices, of other sizes, as one")
    left, dim = len(sizes), after.start
    while left > 1 and left % new[dim] == 0:
        left //= new[dim]
        dim += 1
    if left > 1 and new[dim] % left:
        raise Mixed(cut, "puts channels of several positions together")
    if cut.in_heads and left == new[dim] == 1:
        return None  # of one group of heads here: which of the two dims is longer on the whole tensor is not known
    if inferred is not None and inferred in after and math.prod(new[dim:inferred]) == left == 1:
        dim = inferred
    within = math.prod(new[dim + 1 : after.stop])
    own = (new[dim] // left,) * left
    if left == 1 and within > 1 and not (dim == inferred or new[dim] == sizes[0]):
        _check_heads(cut, new[dim], heads[0], inferred is not None and inferred in after)
    return replace(cut, dim=dim, sizes=own, heads=(None,) * left, in_heads=cut.in_heads or within > 1)


def _check_heads(cut: ChannelCut, leading: int, heads: int | None, other_inferred: bool) -> None:
    """Check that the first dim of a view, of a size that is given, is of this rank's heads and not of all."""
    if heads is None:
        fits = cut.in_heads
    else:  # groups of heads, or parts of each
        fits = heads % leading == 0 or (leading % heads == 0 and leading != heads * cut.ranks and not other_inferred)
    if not fits:
        raise Mixed(cut, _HEADS)


def _group(old: Sequence[int], new: Sequence[int], dim: int) -> tuple[range, range]:
    """The dims around one of the old ones, and the new ones that have their elements."""
    i = j = 0
    while i < len(old):
        first, other = i, j
        a, b = old[i], new[j] if j < len(new) else 1
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        if first <= dim < i:
            return range(first, i), range(other, min(j, len(new)))
    raise AssertionError("a dim of the old shape")
