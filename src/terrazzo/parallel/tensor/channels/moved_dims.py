"""Functions that give dims another order or shape, take parts of them, or put tensors together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from terrazzo.parallel.tensor.channels.cut_dim import ChannelCut, ChannelCuts, FunctionCall, Mixed, merged
from terrazzo.parallel.tensor.channels.split_views import through_view

__all__ = ["MOVES"]


def _moved(order_of: Callable[[FunctionCall, int], Sequence[int]]) -> Callable[[FunctionCall], ChannelCuts]:
    """A rule for a function that gives dims another order: `order_of` says which of the old ones each is."""

    def rule(call: FunctionCall) -> ChannelCuts:
        if (cut := call.cut) is None:
            return []
        count = call.first.dim()
        order = [each % count for each in order_of(call, count)]
        return [(each, replace(cut, dim=order.index(cut.dim))) for each in call.results]

    return rule


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


def _viewed(call: FunctionCall) -> ChannelCuts:
    if (cut := call.cut) is None:
        return []
    (result,) = call.results
    shape, old = list(result.shape), list(call.first.shape)
    given: Any = call.numbers(1, "size", "shape")
    if call.name == "unflatten":
        (dim,) = call.dims(call.argument(1, "dim"))
        given = [*old[:dim], *call.argument(2, "sizes"), *old[dim + 1 :]]
    elif call.name == "flatten" or isinstance(given, Tensor):
        given = shape
    elif not isinstance(given, list | tuple | int):  # a view in another dtype
        return []
    given = [given] if isinstance(given, int) else list(given)
    behind = through_view(cut, old, shape, given.index(-1) if -1 in given else None)
    return [] if behind is None else [(result, behind)]


def _unsqueezed(call: FunctionCall) -> ChannelCuts:
    if (cut := call.cut) is None:
        return []
    (result,) = call.results
    dim = int(call.argument(1, "dim")) % result.dim()
    return [(result, replace(cut, dim=cut.dim + (dim <= cut.dim)))]


def _squeezed(call: FunctionCall) -> ChannelCuts:
    if (cut := call.cut) is None:
        return []
    (result,) = call.results
    gone = [dim for dim in call.dims(call.argument(1, "dim")) if call.first.shape[dim] == 1]
    return [] if cut.dim in gone else [(result, replace(cut, dim=cut.dim - sum(dim < cut.dim for dim in gone)))]


def _expanded(call: FunctionCall) -> ChannelCuts:
    if (cut := call.cut) is None:
        return []
    (result,) = call.results
    dim = cut.dim + result.dim() - call.first.dim()
    sizes = cut.sizes if result.shape[dim] == cut.numel else (result.shape[dim],)
    return [(result, replace(cut, dim=dim, sizes=sizes, heads=(None,) * len(sizes)))]


def _repeated(call: FunctionCall) -> ChannelCuts:
    if (cut := call.cut) is None:
        return []
    (result,) = call.results
    dim = cut.dim + result.dim() - call.first.dim()
    if result.dim() == call.first.dim() and call.name == "repeat_interleave":
        times = result.shape[dim] // cut.numel
        return [(result, replace(cut, sizes=tuple(size * times for size in cut.sizes)))]
    times = result.shape[dim] // cut.numel
    return [(result, replace(cut, dim=dim, sizes=cut.sizes * times, heads=cut.heads * times))]


def _joined(call: FunctionCall) -> ChannelCuts:
    tensors = call.argument(0, "tensors")
    (result,) = call.results
    cuts = [call.cut_of(each) for each in tensors]
    known = [cut for cut in cuts if cut is not None]
    if not known:
        return []
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


_TAKES = "takes channels by their places, and each rank has other ones there"


def _taken(call: FunctionCall) -> ChannelCuts:
    """Of `chunk` and its like: consecutive parts along a dim; of `select` and `unbind` without it."""
    if (cut := call.cut) is None:
        return []
    place = 1 if call.name in ("unbind", "select", "narrow") else 2
    (dim,) = call.dims(call.argument(place, "dim", default=0))
    results = call.results
    if dim != cut.dim:
        shift = dim < cut.dim and call.name in ("unbind", "select")
        return [(each, replace(cut, dim=cut.dim - shift)) for each in results]
    if call.name in ("unbind", "select"):
        raise Mixed(cut, _TAKES)
    start, found = int(call.argument(2, "start")) if call.name == "narrow" else 0, []
    for each in results:
        found.append((each, cut.between(start, start + each.shape[dim])))
        start += each.shape[dim]
    return found


def _halved(call: FunctionCall) -> ChannelCuts:
    """Of `glu`: the first half of a dim, times a gate of the second."""
    if (cut := call.cut) is None:
        return []
    (dim,), half = call.dims(call.argument(1, "dim", default=-1)), cut.numel // 2
    if dim == cut.dim:
        cut.between(half, cut.numel)
        cut = cut.between(0, half)
    return [(each, cut) for each in call.results]


def _indexed(call: FunctionCall) -> ChannelCuts:
    if (cut := call.cut) is None:
        return []
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    used = sum(_dims_of(each) for each in index if each is not Ellipsis)
    filled: list[Any] = []
    for each in index if any(each is Ellipsis for each in index) else (*index, Ellipsis):
        filled += [slice(None)] * (call.first.dim() - used) if each is Ellipsis else [each]
    if sum(isinstance(each, Tensor | list) for each in filled) > 1:
        return []
    old = new = 0
    for each in filled:
        takes = _dims_of(each)
        if old <= cut.dim < old + takes:
            if not isinstance(each, slice):
                raise Mixed(cut, _TAKES)
            return [(result, replace(_sliced(cut, each), dim=new)) for result in call.results]
        old += takes
        is_mask = isinstance(each, Tensor) and each.dtype.is_floating_point is False and takes > 1
        new += 1 if each is None or isinstance(each, slice) or is_mask else getattr(each, "ndim", 0) or _list(each)
    return []


def _dims_of(index: Any) -> int:
    """How many dims an index takes up: a mask has its own."""
    if index is None or isinstance(index, bool):
        return 0
    return int(index.dim()) if isinstance(index, Tensor) and str(index.dtype) == "torch.bool" else 1


def _list(index: Any) -> int:
    return int(isinstance(index, list))


def _sliced(cut: ChannelCut, taken: slice) -> ChannelCut:
    start, stop, step = taken.indices(cut.numel)
    if step == 1:
        return cut.between(start, stop)
    if len(cut.sizes) == 1 and cut.numel % step == 0 and start < step and stop > cut.numel - step + start:
        return replace(cut, sizes=(cut.numel // step,), heads=(None,))  # every second one, say: of neighbours
    raise Mixed(cut, _TAKES)


def _padded(call: FunctionCall) -> ChannelCuts:
    if (cut := call.cut) is None:
        return []
    (result,) = call.results
    if result.shape[cut.dim] != cut.numel:
        raise Mixed(cut, "adds channels where each rank has a part of them")
    return [(result, cut)]


def _nothing(call: FunctionCall) -> ChannelCuts:
    return []


MOVES: dict[str, Callable[[FunctionCall], ChannelCuts]] = {
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _moved(_swapped)),
    **dict.fromkeys(("t", "T", "H"), _moved(lambda call, count: range(count)[::-1])),
    **dict.fromkeys(("mT", "mH", "adjoint"), _moved(lambda call, count: [*range(count - 2), count - 1, count - 2])),
    "permute": _moved(lambda call, count: call.numbers(1, "dims")),
    **dict.fromkeys(("movedim", "moveaxis"), _moved(_movedim)),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"), _viewed),
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expanded),
    **dict.fromkeys(("repeat", "tile", "repeat_interleave"), _repeated),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _joined),
    **dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes", "unbind", "select", "narrow"), _taken),
    "glu": _halved,
    "getitem": _indexed,
    "pad": _padded,
    **dict.fromkeys(("setitem", "type_as", "size", "item", "tolist", "numpy"), _nothing),
}
"""What each makes of the dim that ranks have in parts."""
