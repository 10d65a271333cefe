"""Functions that add up products: of matrices, and of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from terrazzo.parallel.tensor.channels.cut_dim import ChannelCuts, ChannelRule, FunctionCall, Mixed, leaves, merged

__all__ = ["PRODUCTS", "placed"]


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
    values, weight, bias = (call.argument(place, name) for place, name in enumerate(("input", "weight", "bias")))
    letters = "".join(map(chr, range(ord("a"), ord("a") + values.dim() - 1)))
    operands = [values, weight] if bias is None else [values, weight, bias]
    return _contracted(call, operands, [letters + "y", "zy", "z"], letters + "z")


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
    (result,) = call.results
    return placed(call, operands, terms, out, result)


def placed(
    call: FunctionCall, operands: Sequence[Tensor], terms: Sequence[Sequence[str]], out: Sequence[str], result: Tensor
) -> ChannelCuts:
    """Where channels are in a result whose dims have the names `out`, of operands whose dims have those of `terms`."""
    cuts = [(term[cut.dim], cut) for each, term in zip(operands, terms, strict=False) if (cut := call.cut_of(each))]
    for name, cut in cuts:
        if name not in out:
            raise Mixed(cut, "adds up over channels of which each rank has a part")
    behind = [replace(cut, dim=out.index(name)) for name, cut in cuts]
    return [(result, merged(behind, result))] if behind else []


def _attention(whole_dims: tuple[int, int], is_grouped: Callable[[FunctionCall], bool]) -> ChannelRule:
    """A rule for attention.

    Args:
        whole_dims: those of queries, keys, values and the output that are no heads.
        is_grouped: whether heads of a call may have fewer key heads, by their numbers.
    """

    def rule(call: FunctionCall) -> ChannelCuts:
        parts = [call.argument(place, name, name[0]) for place, name in enumerate(("query", "key", "value"))]
        result, behind = call.results[0], {}
        for each in call.tensors:
            if (cut := call.cut_of(each)) is not None:
                behind[cut] = cut.dim - each.dim()
        for cut, dim in behind.items():
            if dim in whole_dims:
                raise Mixed(cut, "adds up over channels of which each rank has a part, since its heads are no dim")
            if is_grouped(call) and any(call.cut_of(each) is None and each.shape[dim] > 1 for each in parts):
                raise Mixed(cut, "groups heads of this rank with those of all ranks")
        cuts = [replace(cut, dim=dim + result.dim()) for cut, dim in behind.items()]
        return [(result, merged(cuts, result))]

    return rule


_FLASH = ("forward", "varlen_forward")


def _always(call: FunctionCall) -> bool:
    return True


PRODUCTS: dict[str, ChannelRule] = {
    **dict.fromkeys(("matmul", "bmm", "mm", "baddbmm", "addmm"), _matmul),
    "linear": _linear,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention((-1, -2), lambda call: bool(call.named.get("enable_gqa"))),
    "flex_attention": _attention((-1, -2), _always),
    **dict.fromkeys(
        (f"{package}::flash_attn_{kind}" for package in ("flash_attn", "flash_attn_3") for kind in _FLASH),
        _attention((-1, -3), _always),
    ),
}
"""By name of the function."""
