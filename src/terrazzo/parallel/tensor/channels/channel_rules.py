"""Which dim of a tensor ranks have in parts, and where that is behind one of torch's functions.

Behind a `colwise` the whole tensor would be the ranks' tensors side by side along one dim: its last, or heads behind a
view. A function is right there if what it makes of the whole tensor is what ranks make of their parts, side by side
again. Of functions that are not named here, one whose result is as large as its arguments, broadcast, is taken to
compute element by element; the result of any other is not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from terrazzo.parallel.tensor.channels.cut_dim import ChannelCut, ChannelCuts, FunctionCall, Mixed, leaves, merged
from terrazzo.parallel.tensor.channels.moved_dims import MOVES

__all__ = ["cuts_behind"]


def cuts_behind(call: FunctionCall) -> ChannelCuts:
    """The results of a call that ranks have in parts, and along which dim.

    Raises:
        Mixed: the call computes with channels of this rank where it would with those of others.
    """
    tensors = [each for each in leaves([*call.args, *call.named.values()]) if isinstance(each, Tensor)]
    if not any(call.cut_of(each) for each in tensors) or call.name.startswith("new_"):
        return []
    if (rule := _RULES.get(call.name)) is not None:
        return rule(call)
    if (cut := call.cut) is not None and (mixed := _mixed_dims(call)) is not None:
        if cut.dim in mixed:
            raise Mixed(cut, "computes with all channels together where each rank has a part of them")
        return _with_fewer_dims(call, cut, mixed)
    return _elementwise(call, tensors)


# -- functions along some dims ---------------------------------------------------------------------------------


_ALL = None
_REDUCE_OR_PLACE = (
    "sum", "nansum", "mean", "nanmean", "prod", "amax", "amin", "max", "min", "aminmax", "any", "all", "std",
    "var", "std_mean", "var_mean", "median", "nanmedian", "argmax", "argmin", "count_nonzero", "logsumexp",
    "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "softmax", "log_softmax", "softmin", "flip",
    "unfold", "gather", "index_select", "index_add", "index_copy", "index_fill", "scatter", "scatter_add",
    "scatter_reduce",
)  # fmt: skip
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(_REDUCE_OR_PLACE, (1, _ALL)),
    **dict.fromkeys(("sort", "argsort", "mode"), (1, -1)),
    **dict.fromkeys(("norm", "vector_norm", "quantile", "nanquantile", "roll", "take_along_dim"), (2, _ALL)),
    **dict.fromkeys(("topk", "kthvalue", "diff", "fft", "ifft", "rfft", "irfft", "hfft", "ihfft"), (2, -1)),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, 1)),
    "gumbel_softmax": (4, -1),
}
"""Functions that compute along dims: the place of these among the arguments, and which they are without."""

_LAST = {
    **dict.fromkeys(("tril", "triu", "matrix_norm", "cdist"), 2),
    **dict.fromkeys(("dot", "vdot", "inner", "mv"), 1),
    **{f"{kind}_pool{dims}d": dims for kind in ("avg", "max", "adaptive_avg", "adaptive_max") for dims in (1, 2, 3)},
}
"""Functions that compute along so many last dims."""


def _mixed_dims(call: FunctionCall) -> list[int] | None:
    """The dims of its first argument along which a function computes; None where it is none that is known to."""
    name, count = call.name, call.first.dim()
    if name in _ALONG:
        place, default = _ALONG[name]
        read = call.numbers if name == "flip" else call.argument
        given = read(place, "dim", "dims", "axis")
        if isinstance(given, Tensor):  # torch.max of two
            return None
        return call.dims(_ALL if isinstance(given, bool) else default if given is None else given)
    if name in _LAST:
        return list(range(count - _LAST[name], count))
    if name in ("layer_norm", "rms_norm"):
        return list(range(count - len(call.argument(1, "normalized_shape")), count))
    if name == "group_norm":
        return list(range(1, count))
    if name == "batch_norm":
        return [0, *range(2, count)]
    if name == "instance_norm" or name.startswith("conv"):
        return list(range(2, count))
    if name.endswith("_loss") or name in ("cross_entropy", "kl_div"):
        return call.dims(_ALL) if call.named.get("reduction", "mean") != "none" or "cross" in name else None
    return None


def _with_fewer_dims(call: FunctionCall, cut: ChannelCut, gone: Sequence[int]) -> ChannelCuts:
    """Results of a function along dims that ranks have whole, which may have left these out."""
    found = []
    for each in call.results:
        dim = cut.dim if each.dim() == call.first.dim() else cut.dim - sum(dim < cut.dim for dim in set(gone))
        if dim < each.dim() and each.shape[dim] == cut.numel:
            found.append((each, replace(cut, dim=dim)))
    return found


# -- element by element ----------------------------------------------------------------------------------------


def _elementwise(call: FunctionCall, tensors: Sequence[Tensor]) -> ChannelCuts:
    found = []
    for result in call.results:
        cuts = []
        for each in tensors:
            shift = result.dim() - each.dim()
            sizes = [] if shift < 0 else zip(each.shape, result.shape[shift:], strict=True)
            if shift >= 0 and all(own in (1, size) for own, size in sizes) and (cut := call.cut_of(each)) is not None:
                cuts.append(replace(cut, dim=cut.dim + shift))
        if cuts:
            found.append((result, merged(cuts, result)))
    return found


# -- products --------------------------------------------------------------------------------------------------


def _matmul(call: FunctionCall) -> ChannelCuts:
    one, other = [each for each in (*call.args, *call.named.values()) if isinstance(each, Tensor)][-2:]
    letters = "".join(map(chr, range(ord("a"), ord("a") + 20)))

    def batch(tensor: Tensor) -> str:
        return letters[20 - max(tensor.dim() - 2, 0) :]

    left = batch(one) + ("xy" if one.dim() > 1 else "y")
    right = batch(other) + ("yz" if other.dim() > 1 else "y")
    out = max(batch(one), batch(other), key=len) + "x" * (one.dim() > 1) + "z" * (other.dim() > 1)
    return _contracted(call, [one, other], [left, right], out)


def _linear(call: FunctionCall) -> ChannelCuts:
    values, weight = call.argument(0, "input"), call.argument(1, "weight")
    letters = "".join(map(chr, range(ord("a"), ord("a") + values.dim() - 1)))
    return _contracted(call, [values, weight], [letters + "y", "zy"], letters + "z")


def _einsum(call: FunctionCall) -> ChannelCuts:
    equation, operands = call.args[0], [each for each in leaves(call.args[1:]) if isinstance(each, Tensor)]
    if not isinstance(equation, str):
        return []
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted({each for each in left if each.isalpha()})
        out = "..." * ("..." in left) + "".join(each for each in letters if left.count(each) == 1)
    dots = [each.dim() - len(term.replace("...", "")) for each, term in zip(operands, terms, strict=True)]
    upper = "".join(map(chr, range(0x100, 0x100 + max(dots))))  # letters that an equation cannot have
    terms = [term.replace("...", upper[len(upper) - count :]) for term, count in zip(terms, dots, strict=True)]
    return _contracted(call, operands, terms, out.replace("...", upper))


def _contracted(call: FunctionCall, operands: Sequence[Tensor], terms: Sequence[str], out: str) -> ChannelCuts:
    """A sum of products, as `torch.einsum` names it."""
    cuts = [(term[cut.dim], cut) for each, term in zip(operands, terms, strict=True) if (cut := call.cut_of(each))]
    for letter, cut in cuts:
        if letter not in out:
            raise Mixed(cut, "adds up over channels of which each rank has a part")
    (result,) = call.results
    placed = [replace(cut, dim=out.index(letter)) for letter, cut in cuts]
    return [(result, merged(placed, result))]


def _attention(call: FunctionCall) -> ChannelCuts:
    query, key, value = call.argument(0, "query"), call.argument(1, "key"), call.argument(2, "value")
    (result,) = call.results
    cuts = []
    for each, whole in ((query, (-1,)), (key, (-1, -2)), (value, (-2,))):
        if (cut := call.cut_of(each)) is not None:
            if cut.dim - each.dim() in whole:
                raise Mixed(cut, "adds up over channels of which each rank has a part, since its heads are no dim")
            cuts.append(cut)
    return [(result, merged(cuts, result))] if cuts else []


_RULES: dict[str, Callable[[FunctionCall], ChannelCuts]] = {
    **MOVES,
    **dict.fromkeys(("matmul", "bmm", "mm", "baddbmm", "addmm"), _matmul),
    "linear": _linear,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
}
