"""What a view makes of the dim that ranks have in parts: heads of channels, and channels of heads.

A view names sizes, and a model takes each either from the tensor that it views, where it is this rank's, or from
elsewhere, where it is of the whole. So one dim of the new shape is larger by the number of ranks on the whole tensor:
that of -1, if no size is this rank's, or else one whose size is. Each dim is such a reading; it is right if the ranks'
parts lie side by side along it. Which are taken:

    -1               a size that is given                         taken
    right, of one                                                 that of -1
    right                                                         that of -1, and those that may be (`_may_be`)
    wrong            right, and surely this rank's (`_is_sure`)   those
    none was given   right, and nothing before it has changed     that
    wrong, not of 1  right, and nothing before it has changed     that
    none was given   right, and of heads (`_is_of_heads`)         those
    none was given   right, and may be this rank's (`_may_be`)    those
    wrong, or none   none of these                                none: the view is refused

Beside them those are taken that are as simple: they are right, and have no more runs in a row. Where several are
taken, computing along any of them is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from terrazzo.parallel.tensor.channels.cut_dim import ChannelCut, Mixed

__all__ = ["through_view"]

_HEADS = (
    "makes heads of channels, and does not say how many each rank has: view them as [..., -1, channels of a head], or "
    "give the number of all heads in the plan, as terrazzo.parallel.Colwise(heads=n)"
)


def through_view(cut: ChannelCut, old: Sequence[int], new: Sequence[int], inferred: int | None) -> list[ChannelCut]:
    """The dim behind a view from one shape to another; where it is not known which of some it is, each of these.

    Args:
        inferred: the dim of the new shape whose size was given as -1.

    Raises:
        Mixed: on the whole tensor, the view may not have the ranks' parts side by side.
    """
    old, new = [*old], [*new]
    if 0 in old:
        return []
    if old == new:
        return [cut]
    readings = {dim: found for dim in range(len(new)) if (found := _reading(cut, old, new, dim)) is not None}
    kept = cut.dim if old[: cut.dim + 1] == new[: cut.dim + 1] and len(cut.sizes) == 1 else None
    if inferred in readings:
        if math.prod(new[inferred + 1 :]) > math.prod(old[cut.dim + 1 :]):
            readings[inferred] = _with_heads(cut, readings[inferred])
        taken = [inferred]
        if new[inferred] > 1:
            taken += [dim for dim in readings if _may_be(cut, old, new, readings[dim])]
            taken += _as_simple(readings, taken[:1])
        return [each for dim, each in readings.items() if dim in taken or dim == kept]
    if kept in readings and not (inferred is not None and new[inferred] == 1):  # which may be more of the whole
        return [readings[kept]]
    taken = [dim for dim in readings if _is_of_heads(cut, new, readings[dim])]
    if inferred is None:
        taken = taken or [dim for dim in readings if _may_be(cut, old, new, readings[dim])]
    else:
        taken = [dim for dim in readings if _is_sure(cut, old, new, readings[dim])]
    if not taken:
        raise Mixed(cut, _HEADS)
    return [each for dim, each in readings.items() if dim in taken or dim in _as_simple(readings, taken)]


def _as_simple(readings: Mapping[int, ChannelCut], taken: Sequence[int]) -> list[int]:
    """Those with no more runs in a row than one of some others."""
    fewest = min(len(readings[dim].sizes) for dim in taken)
    return [dim for dim, each in readings.items() if len(each.sizes) <= fewest]


def _reading(cut: ChannelCut, old: Sequence[int], new: Sequence[int], dim: int) -> ChannelCut | None:
    """The cut, if this is the new dim that is larger on the whole tensor; None: parts are not side by side along it.

    Both shapes are one row of elements: the runs of each position, one behind the other. A row along the new dim must
    be of whole runs, and each row of the same ones.
    """
    positions, inner = math.prod(old[: cut.dim]), math.prod(old[cut.dim + 1 :])
    rows, behind = math.prod(new[:dim]), math.prod(new[dim + 1 :])
    runs = _runs_of_a_row([*zip(cut.sizes, cut.heads, strict=True)], positions, rows)
    if runs is None or any(size * inner % behind for size, _ in runs):
        return None
    return replace(
        cut, dim=dim, sizes=tuple(size * inner // behind for size, _ in runs), heads=tuple(n for _, n in runs)
    )


def _runs_of_a_row(
    runs: list[tuple[int, int | None]], positions: int, rows: int
) -> list[tuple[int, int | None]] | None:
    """Those that each of `rows` has of the runs of all positions; None where rows have other ones than each other."""
    each, left = divmod(positions * len(runs), rows)
    if left or each == 0:
        return None
    if runs == runs[:1] * len(runs):
        return runs[:1] * each
    if each % len(runs) == 0:
        return runs * (each // len(runs))
    times, left = divmod(len(runs), each)
    return runs[:each] if not left and runs == runs[:each] * times else None


def _with_heads(cut: ChannelCut, found: ChannelCut) -> ChannelCut:
    """Heads that -1 has made of channels: so many has this rank, if the plan does not know it better."""
    for size, known in zip(found.sizes, found.heads, strict=True):
        if known is not None and size == known * cut.counts.ranks:  # of channels of a head of the whole over these here
            raise Mixed(cut, _HEADS)
    cut.counts.here.update(found.sizes)
    heads = (size if known is None else known for size, known in zip(found.sizes, found.heads, strict=True))
    return replace(found, heads=tuple(heads))


def _may_be(cut: ChannelCut, old: Sequence[int], new: Sequence[int], found: ChannelCut) -> bool:
    """Whether the size of a new dim may be this rank's: of old dims together, or of heads that it has."""
    starts = [math.prod(old[:place]) for place in range(cut.dim + 1)]
    ends = [math.prod(old[place:]) for place in range(cut.dim + 1, len(old) + 1)]
    is_of_old = math.prod(new[: found.dim]) in starts and math.prod(new[found.dim + 1 :]) in ends
    return is_of_old or _is_of_heads(cut, new, found)


def _is_sure(cut: ChannelCut, old: Sequence[int], new: Sequence[int], found: ChannelCut) -> bool:
    """Whether the size of a new dim is this rank's, beside a -1 that would be wrong if it were the whole one's.

    It is if all new dims are old ones, alone or together, and the size is not the same without this rank's part.
    """
    is_of_old = max(cut.sizes) > 1 and _are_old_dims(old, new)
    return is_of_old or _is_of_heads(cut, new, found)


def _is_of_heads(cut: ChannelCut, new: Sequence[int], found: ChannelCut) -> bool:
    """Whether the size of a new dim is that of all heads which this rank has, or of groups of them."""
    size, heads = new[found.dim], found.heads[0]
    if len(found.sizes) > 1 or heads is None:
        return False
    return size == heads or (size in cut.counts.here and heads % size == 0)


def _are_old_dims(old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether each new dim is an old one, or several that were neighbours."""
    rest = iter(old)
    for size in new:
        together = next(rest, 0)
        while 0 < together < size:
            together *= next(rest, 0)
        if together != size:
            return False
    return all(size == 1 for size in rest)
