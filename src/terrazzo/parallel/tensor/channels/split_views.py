"""What a view makes of the dim that ranks have in parts: heads of channels, and channels of heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from terrazzo.parallel.tensor.channels.cut_dim import ChannelCut, Mixed

__all__ = ["flattened", "through_view", "unflattened"]

_HEADS = (
    "makes heads of channels, and does not say how many each rank has: view them as [..., -1, channels of a head], or "
    "give the number of all heads in the plan, as terrazzo.parallel.Colwise(heads=n),"
)


def through_view(cut: ChannelCut, old: Sequence[int], new: Sequence[int], inferred: int | None) -> list[ChannelCut]:
    """The dim behind a view from one shape to another; where it is not known which of some it is, each of these.

    Args:
        inferred: the dim of the new shape whose size was given as -1.

    Raises:
        Mixed: on the whole tensor, the view would not have the ranks' parts side by side.
    """
    if 0 in old:
        return []
    before, after = _group(old, new, cut.dim)
    same_behind = len(old) - before.start == len(new) - after.start
    is_kept = len(before) == len(after) == 1 and (same_behind or len(new) >= len(old))
    if old[cut.dim] == 1 and not is_kept:
        return _of_one_head(cut, math.prod(old[cut.dim + 1 :]), new, inferred)
    outer = math.prod(old[before.start : cut.dim])
    inner = math.prod(old[cut.dim + 1 : before.stop])
    sizes, heads = tuple(size * inner for size in cut.sizes) * outer, cut.heads * outer
    if len(after) == 1:
        found = [replace(cut, dim=after.start, sizes=sizes, heads=heads)]
        if len(sizes) > 1 == max(sizes) and not same_behind and 1 in new[after.stop : after.stop + 1]:
            found.append(replace(cut, dim=after.stop, sizes=(1,), heads=heads[:1]))  # of one head of each sequence
        return [each for each in found if each.dim == inferred] or found
    if len(set(sizes)) > 1:
        raise Mixed(cut, "views parts of several matrices, of other sizes, as one")
    left, dim = len(sizes), after.start
    while left > 1 and left % new[dim] == 0:
        left //= new[dim]
        dim += 1
    if left > 1 and new[dim] % left:
        raise Mixed(cut, "puts channels of several positions together")
    if cut.in_heads and left == new[dim] == 1 and dim != inferred:  # of one group of heads here: which dim is longer?
        either = range(dim, min(dim + 2, after.stop))
        return [replace(cut, dim=each, sizes=(new[each],), heads=(None,)) for each in either]
    if inferred is not None and inferred in after and math.prod(new[dim:inferred]) == left == 1:
        dim = inferred
    within = math.prod(new[dim + 1 : after.stop])
    own = (new[dim] // left,) * left
    if within > 1 and not (dim == inferred or own[0] == sizes[0]):
        _check_heads(cut, own[0], heads[0], inferred is not None and inferred in after)
    return [replace(cut, dim=dim, sizes=own, heads=(None,) * left, in_heads=cut.in_heads or within > 1)]


def flattened(cut: ChannelCut, old: Sequence[int], start: int, stop: int) -> ChannelCut:
    """The dim where those from `start` to before `stop` have been made one."""
    if not start <= cut.dim < stop:
        return replace(cut, dim=cut.dim - (stop - start - 1) * (cut.dim >= stop))
    outer, inner = math.prod(old[start : cut.dim]), math.prod(old[cut.dim + 1 : stop])
    return replace(cut, dim=start, sizes=tuple(size * inner for size in cut.sizes) * outer, heads=cut.heads * outer)


def unflattened(cut: ChannelCut, old: int, dim: int, sizes: Sequence[int], inferred: int | None) -> list[ChannelCut]:
    """The dim where one of `old` elements has been made several, of `sizes`."""
    if dim != cut.dim:
        return [replace(cut, dim=cut.dim + (len(sizes) - 1) * (dim < cut.dim))]
    return [replace(each, dim=each.dim + dim) for each in through_view(replace(cut, dim=0), [old], sizes, inferred)]


def _of_one_head(cut: ChannelCut, inner: int, new: Sequence[int], inferred: int | None) -> list[ChannelCut]:
    """The new dims that all heads may have been made one with, where this rank has one, of `inner` elements."""
    found, behind = [], math.prod(new)
    for dim, size in enumerate(new):
        behind //= size
        if inner % behind == 0 and (size * behind) % inner == 0:
            outer = size * behind // inner
            found.append(replace(cut, dim=dim, sizes=(inner // behind,) * outer, heads=cut.heads * outer))
    return [each for each in found if each.dim == inferred] or found


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
