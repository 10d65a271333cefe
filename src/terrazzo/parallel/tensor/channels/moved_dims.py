"""Functions that give dims another order or shape, take parts of them, or put tensors together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from terrazzo.parallel.tensor.channels.cut_dim import (
    TAKES,
    ChannelCut,
    ChannelCuts,
    ChannelRule,
    FunctionCall,
    Mixed,
    merged,
)
from terrazzo.parallel.tensor.channels.split_views import through_view

__all__ = ["MOVES"]

Move = Callable[[FunctionCall, ChannelCut, Tensor], ChannelCut | list[ChannelCut]]
"""Where channels of the first argument are in a result; where that is not known, all places where they may be."""


def _of_first(move: Move) -> ChannelRule:
    """A rule for a function that makes of its first argument what the others say."""

    def rule(call: FunctionCall) -> ChannelCuts:
        if (cut := call.cut) is None:
            return []
        found = []
        for each in call.results:
            behind = move(call, cut, each)
            found += [(each, one) for one in (behind if isinstance(behind, list) else [behind])]
        return found

    return rule


def _kept(call: FunctionCall, cut: ChannelCut, result: Tensor) -> ChannelCut:
    return cut


def _moved(order_of: Callable[[FunctionCall, int], Sequence[int]]) -> Move:
    """Dims in another order: `order_of` says which of the old ones each is."""

    def move(call: FunctionCall, cut: ChannelCut, result: Tensor) -> ChannelCut:
        count = call.first.dim()
        return replace(cut, dim=[each % count for each in order_of(call, count)].index(cut.dim))

    return move


def _swapped(call: FunctionCall, count: int) -> list[int]:
    (one,), (other,) = (call.dims(call.argument(n, f"dim{n - 1}", f"axis{n - 1}")) for n in (1, 2))
    order = list(range(count))
    order[one], order[other] = other, one
    return order


def _movedim(call: FunctionCall, count: int) -> list[int]:
    source, target = call.dims(call.argument(1, "source")), call.dims(call.argument(2, "destination"))
    rest = iter([each for each in range(count) if each not in source])
    at = dict(zip(target, source, strict=True))
    return [at[dim] if dim in at else next(rest) for dim in range(count)]


def _viewed(call: FunctionCall, cut: ChannelCut, result: Tensor) -> list[ChannelCut]:
    shape = list(result.shape)
    given: Any = call.numbers(1, "size", "shape")
    if isinstance(given, Tensor):
        given = shape
    elif not isinstance(given, list | tuple | int):  # a view in another dtype
        return [cut]
    return through_view(cut, call.first.shape, shape, _inferred(given))


def _flattened(call: FunctionCall, cut: ChannelCut, result: Tensor) -> list[ChannelCut]:
    (start,), (end,) = (
        call.dims(call.argument(place, name, default=default))
        for place, name, default in ((1, "start_dim", 0), (2, "end_dim", -1))
    )
    if start == end or not start <= cut.dim <= end:
        return [_beside(cut, start, result.dim() - call.first.dim())]
    behind = through_view(cut, call.first.shape, result.shape, start)
    return [each for each in behind if each.dim == start] or behind  # whose size nobody has given


def _unflattened(call: FunctionCall, cut: ChannelCut, result: Tensor) -> list[ChannelCut]:
    (dim,), place = call.dims(call.argument(1, "dim")), _inferred(call.argument(2, "sizes"))
    if dim != cut.dim:
        return [_beside(cut, dim, result.dim() - call.first.dim())]
    return through_view(cut, call.first.shape, result.shape, None if place is None else dim + place)


def _beside(cut: ChannelCut, dim: int, more: int) -> ChannelCut:
    """The cut of a dim beside the one that becomes so many `more`."""
    return replace(cut, dim=cut.dim + more * (dim < cut.dim))


def _inferred(given: Any) -> int | None:
    """The place of -1 among sizes."""
    sizes = [given] if isinstance(given, int) else list(given)
    return sizes.index(-1) if -1 in sizes else None


def _unsqueezed(call: FunctionCall, cut: ChannelCut, result: Tensor) -> ChannelCut:
    return replace(cut, dim=cut.dim + (int(call.argument(1, "dim")) % result.dim() <= cut.dim))


def _squeezed(call: FunctionCall, cut: ChannelCut, result: Tensor) -> ChannelCut:
    gone = [dim for dim in call.dims(call.argument(1, "dim")) if call.first.shape[dim] == 1]
    if cut.dim in gone:
        raise Mixed(cut, "leaves out the dim of channels, of which this rank has one")
    return replace(cut, dim=cut.dim - sum(dim < cut.dim for dim in gone))


def _expanded(call: FunctionCall, cut: ChannelCut, result: Tensor) -> ChannelCut:
    dim = cut.dim + result.dim() - call.first.dim()
    sizes = cut.sizes if result.shape[dim] == cut.numel else (result.shape[dim],)
    return replace(cut, dim=dim, sizes=sizes, heads=(None,) * len(sizes))


def _repeated(call: FunctionCall, cut: ChannelCut, result: Tensor) -> ChannelCut:
    dim = cut.dim + result.dim() - call.first.dim()
    times, left = divmod(result.shape[dim], cut.numel) if dim >= 0 else (0, 1)
    is_flat = call.name == "repeat_interleave" and result.dim() != call.first.dim()
    if left or is_flat or (times > 1 and isinstance(call.argument(1, "repeats"), Tensor)):
        raise Mixed(cut, "repeats channels, each rank others")
    if call.name == "repeat_interleave":
        return replace(cut, sizes=tuple(size * times for size in cut.sizes))
    return replace(cut, dim=dim, sizes=cut.sizes * times, heads=cut.heads * times)


def _halved(call: FunctionCall, cut: ChannelCut, result: Tensor) -> ChannelCut:
    """Of `glu`: the first half of a dim, times a gate of the second."""
    (dim,), half = call.dims(call.argument(1, "dim", default=-1)), cut.numel // 2
    if dim != cut.dim:
        return cut
    cut.between(half, cut.numel, by_number=False)
    return cut.between(0, half, by_number=False)


def _padded(call: FunctionCall, cut: ChannelCut, result: Tensor) -> ChannelCut:
    place = 2 * (result.dim() - 1 - cut.dim)  # of pairs, the last dim's first
    if any(call.argument(1, "pad")[place : place + 2]):
        raise Mixed(cut, "adds channels where each rank has a part of them")
    return cut


def _windowed(call: FunctionCall, cut: ChannelCut, result: Tensor) -> ChannelCut:
    """Of `Tensor.unfold`: windows along a dim, whose places are in a new last one."""
    if len(call.args) + len(call.named) != 4 or "kernel_size" in call.named:  # torch.nn.functional.unfold
        raise Mixed(cut, "is not known to keep channels apart")
    if call.dims(call.argument(1, "dimension")) == [cut.dim]:
        raise Mixed(cut, TAKES)
    return cut


def _paired(call: FunctionCall, cut: ChannelCut, result: Tensor) -> ChannelCut:
    """Of `view_as_complex`: pairs of the last dim."""
    if cut.dim == result.dim():
        raise Mixed(cut, TAKES)
    return cut


def _shared(call: FunctionCall, cut: ChannelCut, result: Tensor) -> ChannelCut:
    """Of `.data`, which is read, or set."""
    if call.result is None:
        raise Mixed(cut, "gives a tensor the values of another, which is not followed")
    return cut


# -- of several tensors, or to several -------------------------------------------------------------------------


def _joined(call: FunctionCall) -> ChannelCuts:
    (result,) = call.results
    cuts = [call.cut_of(each) for each in call.argument(0, "tensors")]
    known = [cut for cut in cuts if cut is not None]
    (dim,) = call.dims(call.argument(1, "dim", "axis", default=0), result)
    if call.name == "stack":
        return [(result, merged([replace(cut, dim=cut.dim + (dim <= cut.dim)) for cut in known], result))]
    if any(cut.dim != known[0].dim for cut in known):
        raise Mixed(known[0], f"puts channels together with other channels, those of {known[1].name!r}")
    if dim != known[0].dim:
        return [(result, merged(known, result))]
    if len(known) < len(cuts):
        raise Mixed(known[0], "puts this rank's channels together with others that every rank has")
    sizes = tuple(size for cut in known for size in cut.sizes)
    return [(result, replace(known[0], sizes=sizes, heads=tuple(each for cut in known for each in cut.heads)))]


def _taken(call: FunctionCall) -> ChannelCuts:
    """Of `chunk` and its like: consecutive parts along a dim; of `select` and `unbind` without it."""
    if (cut := call.cut) is None:
        return []
    drops = call.name in ("unbind", "select")
    (dim,) = call.dims(call.argument(1 if drops or call.name == "narrow" else 2, "dim", default=0))
    if dim != cut.dim:
        return [(each, replace(cut, dim=cut.dim - (drops and dim < cut.dim))) for each in call.results]
    if drops:
        raise Mixed(cut, TAKES)
    if call.name == "chunk" and call.argument(1, "chunks") == 1:
        return [(each, cut) for each in call.results]
    start, found = int(call.argument(2, "start")) if call.name == "narrow" else 0, []
    by_number = _is_by_number(call)
    for each in call.results:
        found.append((each, cut.between(start, start + each.shape[dim], by_number=by_number)))
        start += each.shape[dim]
    return found


def _is_by_number(call: FunctionCall) -> bool:
    """Whether parts are given by sizes or places that may be the whole's: not by how many, nor by all sizes."""
    is_one = isinstance(call.argument(1, "split_size_or_sections", "split_size"), int)
    return call.name == "narrow" or (is_one == (call.name == "split") and call.name in ("split", "tensor_split"))


_FRESH = ("item", "tolist", "numpy", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
MOVES: dict[str, ChannelRule] = {
    **{
        name: _of_first(move)
        for names, move in {
            ("transpose", "swapaxes", "swapdims"): _moved(_swapped),
            ("t", "T", "H"): _moved(lambda call, count: range(count)[::-1]),
            ("mT", "mH", "adjoint"): _moved(lambda call, count: [*range(count - 2), count - 1, count - 2]),
            ("permute",): _moved(lambda call, count: call.numbers(1, "dims")),
            ("movedim", "moveaxis"): _moved(_movedim),
            ("view", "reshape", "view_as", "reshape_as", "unsafe_view"): _viewed,
            ("flatten", "ravel"): _flattened,
            ("unflatten",): _unflattened,
            ("unsqueeze",): _unsqueezed,
            ("squeeze",): _squeezed,
            ("expand", "expand_as", "broadcast_to"): _expanded,
            ("repeat", "tile", "repeat_interleave"): _repeated,
            ("glu",): _halved,
            ("pad",): _padded,
            ("unfold",): _windowed,
            ("view_as_complex",): _paired,
            ("view_as_real", "real", "imag", "conj", "type_as"): _kept,
            ("data",): _shared,
        }.items()
        for name in names
    },
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _joined),
    **dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes", "unbind", "select", "narrow"), _taken),
    **dict.fromkeys(_FRESH, lambda call: []),
}
"""What each makes of the dim that ranks have in parts."""
