"""Functions that compute along some dims of their first argument: reductions, norms, sorts, pools, losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from terrazzo.parallel.tensor.channels.cut_dim import TAKES, ChannelCuts, FunctionCall, Mixed

__all__ = ["ALONG", "Along"]


@dataclass(frozen=True)
class Along:
    """A rule: ranks must have whole all dims along which a function computes. Results may have left these out.

    Attributes:
        dims: those of a call; None: it is one without any, such as of `torch.max` of two tensors.
        writes: the result is the first argument with the last written to it: all of this rank's channels into one that
            had none have their dim there.
    """

    dims: Callable[[FunctionCall], list[int] | None]
    writes: bool = False

    def __call__(self, call: FunctionCall) -> ChannelCuts:
        cut, along = call.cut, self.dims(call) or []
        known = [(each, other) for each in call.tensors if (other := call.cut_of(each)) is not None]
        if cut is None and known and self.writes and call.first.shape[known[0][1].dim] == known[0][1].numel:
            cut = known[0][1]
        for each, other in known:
            if cut is None or each.dim() != call.first.dim() or (other.dim, other.sizes) != (cut.dim, cut.sizes):
                raise Mixed(other, "puts channels together with another dim")
        if cut is None:
            return []
        if self.writes and any(
            each.dim() == call.first.dim() and each.shape[cut.dim] != cut.numel for each in call.tensors
        ):  # an index of fewer, which is of the first ones
            raise Mixed(cut, TAKES)
        if cut.dim in along:
            raise Mixed(cut, "computes with all channels together where each rank has a part of them")
        found = []
        for each in call.results:
            dim = cut.dim if each.dim() == call.first.dim() else cut.dim - sum(dim < cut.dim for dim in set(along))
            if dim >= each.dim() or each.shape[dim] != cut.numel:
                raise Mixed(cut, "gives a result in which its channels are not found")
            found.append((each, replace(cut, dim=dim)))
        return found


_ALL = None


def _given(place: int, default: int | tuple[int, ...] | None, writes: bool = False) -> Along:
    """The dims at a place among the arguments, or under a name; `default`: which these are without."""

    def dims(call: FunctionCall) -> list[int] | None:
        read = call.numbers if call.name == "flip" else call.argument
        given: Any = read(place, "dim", "dims", "axis")
        if isinstance(given, Tensor) or "other" in call.named:  # torch.max of two
            return None
        return call.dims(_ALL if isinstance(given, bool) else default if given is None else given)

    return Along(dims, writes)


def _from(first: Callable[[FunctionCall, int], int]) -> Along:
    """All dims from one on, which `first` says of a call whose first argument has so many."""
    return Along(lambda call: [*range(first(call, call.first.dim()), call.first.dim())])


def _last(count: int) -> Along:
    return _from(lambda call, dims: dims - count)


def _convolution(count: int) -> Along:
    """So many last dims, and the one of channels before them, unless each channel is convolved by itself."""

    def first(call: FunctionCall, dims: int) -> int:
        channels = dims - 1 - count
        return channels + bool(call.argument(6, "groups") == call.first.shape[channels])

    return _from(first)


def _loss(call: FunctionCall) -> list[int] | None:
    return None if call.named.get("reduction") == "none" else call.dims(_ALL)


_KINDS: dict[Along, tuple[str, ...]] = {
    _given(1, _ALL): (
        "sum", "nansum", "mean", "nanmean", "prod", "amax", "amin", "max", "min", "aminmax", "any", "all", "std",
        "var", "std_mean", "var_mean", "median", "nanmedian", "argmax", "argmin", "count_nonzero", "logsumexp",
        "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "softmax", "log_softmax", "softmin", "flip",
        "gather", "index_select", "index_fill", "fftshift", "ifftshift",
    ),
    _given(1, _ALL, writes=True): ("index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce"),
    _given(1, -1): ("sort", "argsort", "mode"),
    _given(2, _ALL): (
        "norm", "vector_norm", "quantile", "nanquantile", "roll", "take_along_dim", "fftn", "ifftn", "rfftn", "irfftn",
    ),
    _given(2, -1): ("topk", "kthvalue", "diff", "fft", "ifft", "rfft", "irfft", "hfft", "ihfft"),
    _given(2, (-2, -1)): ("fft2", "ifft2", "rfft2", "irfft2"),
    _given(2, 1): ("normalize", "cosine_similarity"),
    _given(4, -1): ("gumbel_softmax",),
    _last(1): ("dot", "vdot", "inner", "mv"),
    _last(2): ("tril", "triu", "matrix_norm", "cdist"),
    **{
        _last(dims): tuple(f"{kind}_pool{dims}d" for kind in ("avg", "max", "adaptive_avg", "adaptive_max"))
        for dims in (1, 2, 3)
    },
    **{_convolution(dims): (f"conv{dims}d",) for dims in (1, 2, 3)},
    _from(lambda call, dims: dims - len(call.argument(1, "normalized_shape"))): ("layer_norm", "rms_norm"),
    _from(lambda call, dims: 1): ("group_norm",),
    _from(lambda call, dims: 2): ("instance_norm",),
    Along(lambda call: [0, *range(2, call.first.dim())]): ("batch_norm",),
    Along(_loss): (
        "l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "multilabel_margin_loss",
        "multilabel_soft_margin_loss", "multi_margin_loss", "margin_ranking_loss", "hinge_embedding_loss",
        "cosine_embedding_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss", "poisson_nll_loss",
        "gaussian_nll_loss", "nll_loss", "ctc_loss", "kl_div", "cross_entropy", "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
    ),
}  # fmt: skip

ALONG: dict[str, Along] = {name: rule for rule, names in _KINDS.items() for name in names}
"""By name of the function."""
