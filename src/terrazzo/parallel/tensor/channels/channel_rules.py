"""Which dim of a tensor ranks have in parts, and where that is behind one of torch's functions.

Behind a `colwise` the whole tensor would be the ranks' tensors side by side along one dim: its last, or heads behind a
view. A function is right there if what it makes of the whole tensor is what ranks make of their parts, side by side
again. One that has no rule here must compute element by element, as `elementwise` sees, or is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from terrazzo.parallel.tensor.channels.cut_dim import ChannelCuts, ChannelRule, FunctionCall, Mixed, leaves, merged
from terrazzo.parallel.tensor.channels.moved_dims import MOVES

__all__ = ["rule_of"]


def rule_of(call: FunctionCall) -> ChannelRule | None:
    """The rule for a call that has no result yet; None: there is none for functions of its name."""
    return _RULES.get(call.name) or (None if _dims_along(call) is None else _along)


# -- functions along some dims ---------------------------------------------------------------------------------


_ALL = None
_WRITE = ("index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce")
_REDUCE_OR_PLACE = (
    "sum", "nansum", "mean", "nanmean", "prod", "amax", "amin", "max", "min", "aminmax", "any", "all", "std",
    "var", "std_mean", "var_mean", "median", "nanmedian", "argmax", "argmin", "count_nonzero", "logsumexp",
    "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "softmax", "log_softmax", "softmin", "flip",
    "gather", "index_select", "index_fill", "fftshift", "ifftshift", *_WRITE,
)  # fmt: skip
_ALONG: dict[str, tuple[int, int | tuple[int, int] | None]] = {
    **dict.fromkeys(_REDUCE_OR_PLACE, (1, _ALL)),
    **dict.fromkeys(("sort", "argsort", "mode"), (1, -1)),
    **dict.fromkeys(("norm", "vector_norm", "quantile", "nanquantile", "roll", "take_along_dim"), (2, _ALL)),
    **dict.fromkeys(("topk", "kthvalue", "diff", "fft", "ifft", "rfft", "irfft", "hfft", "ihfft"), (2, -1)),
    **dict.fromkeys(("fft2", "ifft2", "rfft2", "irfft2"), (2, (-2, -1))),
    **dict.fromkeys(("fftn", "ifftn", "rfftn", "irfftn"), (2, _ALL)),
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

_CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}


def _dims_along(call: FunctionCall) -> list[int] | None:
    """The dims of its first argument along which a function computes; None where it is none that is known to."""
    name, count = call.name, call.first.dim() if isinstance(call.first, Tensor) else 0
    if name in _ALONG:
        place, default = _ALONG[name]
        read = call.numbers if name == "flip" else call.argument
        given = read(place, "dim", "dims", "axis")
        if isinstance(given, Tensor) or "other" in call.named:  # torch.max of two
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
    if name == "instance_norm":
        return list(range(2, count))
    if name in _CONVOLUTIONS:
        channels = count - 1 - _CONVOLUTIONS[name]
        return list(range(channels + (call.argument(6, "groups") == call.first.shape[channels]), count))
    if name.endswith("_loss") or name in ("cross_entropy", "kl_div"):
        return call.dims(_ALL) if call.named.get("reduction", "mean") != "none" or "cross" in name else None
    return None


def _along(call: FunctionCall) -> ChannelCuts:
    """Results of a function along dims that ranks have whole, which may have left these out."""
    cut, along = call.cut, _dims_along(call) or []
    known = [(each, other) for each in call.tensors if (other := call.cut_of(each)) is not None]
    if cut is None and known and call.name in _WRITE and call.first.shape[known[0][1].dim] == known[0][1].numel:
        cut = known[0][1]  # all of them into a tensor that had none, such as a cache
    for each, other in known:
        if cut is None or each.dim() != call.first.dim() or (other.dim, other.sizes) != (cut.dim, cut.sizes):
            raise Mixed(other, "puts channels together with another dim")
    if cut is None:
        return []
    if cut.dim in along:
        raise Mixed(cut, "computes with all channels together where each rank has a part of them")
    found = []
    for each in call.results:
        dim = cut.dim if each.dim() == call.first.dim() else cut.dim - sum(dim < cut.dim for dim in set(along))
        if dim >= each.dim() or each.shape[dim] != cut.numel:
            raise Mixed(cut, "gives a result in which its channels are not found")
        found.append((each, replace(cut, dim=dim)))
    return found


# -- products --------------------------------------------------------------------------------------------------


def _matmul(call: FunctionCall) -> ChannelCuts:
    *added, one, other = call.tensors
    letters = "".join(map(chr, range(ord("a"), ord("a") + 20)))

    def batch(tensor: Tensor) -> str:
        return letters[20 - max(tensor.dim() - 2, 0) :]

    left = batch(one) + ("xy" if one.dim() > 1 else "y")
    right = batch(other) + ("yz" if other.dim() > 1 else "y")
    out = max(batch(one), batch(other), key=len) + "x" * (one.dim() > 1) + "z" * (other.dim() > 1)
    shift = len(out) - added[0].dim() if added else 0
    return _contracted(call, [one, other, *added], [left, right, out[shift:]], out)


def _linear(call: FunctionCall) -> ChannelCuts:
    values, weight = call.argument(0, "input"), call.argument(1, "weight")
    letters = "".join(map(chr, range(ord("a"), ord("a") + values.dim() - 1)))
    return _contracted(call, [values, weight], [letters + "y", "zy"], letters + "z")


def _einsum(call: FunctionCall) -> ChannelCuts:
    equation, operands = call.args[0], [each for each in leaves(call.args[1:]) if isinstance(each, Tensor)]
    if not isinstance(equation, str):
        raise Mixed(next(filter(None, map(call.cut_of, call.tensors))), "has no equation that could be read")
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
    cuts = [(term[cut.dim], cut) for each, term in zip(operands, terms, strict=False) if (cut := call.cut_of(each))]
    for letter, cut in cuts:
        if letter not in out:
            raise Mixed(cut, "adds up over channels of which each rank has a part")
    (result,) = call.results
    placed = [replace(cut, dim=out.index(letter)) for letter, cut in cuts]
    return [(result, merged(placed, result))]


def _attention(*whole_dims: int) -> ChannelRule:
    """A rule for attention, whose heads are no such dim of queries, keys, values and the output."""

    def rule(call: FunctionCall) -> ChannelCuts:
        names, cuts = ("query", "key", "value"), []
        for place, name in enumerate(names):
            each = call.argument(place, name, name[0])
            if (cut := call.cut_of(each)) is not None:
                if cut.dim - each.dim() in whole_dims:
                    raise Mixed(cut, "adds up over channels of which each rank has a part, since its heads are no dim")
                cuts.append(cut)
        result = call.results[0]
        return [(result, merged(cuts, result))] if cuts else []

    return rule


_RULES: dict[str, ChannelRule] = {
    **MOVES,
    **dict.fromkeys(("matmul", "bmm", "mm", "baddbmm", "addmm"), _matmul),
    "linear": _linear,
    "einsum": _einsum,
    **dict.fromkeys(("scaled_dot_product_attention", "flex_attention"), _attention(-1, -2)),
    **dict.fromkeys(("flash_attn_forward", "flash_attn_varlen_forward"), _attention(-1, -3)),
}
