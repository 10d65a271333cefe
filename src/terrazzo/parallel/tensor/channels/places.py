"""Channels that are read and written by their places, as in `x[..., :4]` and `x[:, 0] = y`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
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

__all__ = ["PLACES"]


def _read(call: FunctionCall) -> ChannelCuts:
    if (cut := call.cut) is None:  # an index is in parts
        raise Mixed(next(filter(None, map(call.cut_of, call.tensors))), TAKES)
    return [(each, _behind(call.args[1], call.first, each, cut)) for each in call.results]


def _written(call: FunctionCall) -> ChannelCuts:
    target, index, value = call.args
    known = [cut for each in call.tensors if (cut := call.cut_of(each)) is not None]
    if _is_mask(index) and index.shape == target.shape and not getattr(value, "ndim", 0):  # as `where` does
        return [(target, merged(known, target))]
    within = target.detach()[index]
    given = call.cut_of(value) if isinstance(value, Tensor) else None
    cuts = [] if given is None else [replace(given, dim=given.dim + within.dim() - value.dim())]
    if call.cut is not None:
        merged([_behind(index, target, within, call.cut), *cuts], within)
        return []
    for cut in cuts:
        for dim, size in enumerate(target.shape):
            whole, there = _taken(index, target.dim(), within.dim(), dim)
            if whole == slice(None) and there == cut.dim and size == cut.numel:
                return [(target, replace(cut, dim=dim))]
    raise Mixed(known[0], TAKES)


PLACES: dict[str, ChannelRule] = {"getitem": _read, "setitem": _written}


def _behind(index: Any, tensor: Tensor, result: Tensor, cut: ChannelCut) -> ChannelCut:
    """Where channels of a tensor are in what an index gives of it."""
    taken, dim = _taken(index, tensor.dim(), result.dim(), cut.dim)
    if not isinstance(taken, slice):
        raise Mixed(cut, TAKES)
    start, step = int(taken.start or 0), int(taken.step or 1)
    ends_there = taken.stop is None or taken.stop == sys.maxsize
    stop = cut.numel if ends_there else int(taken.stop)
    if step == 1 and start == 0 and ends_there:
        return replace(cut, dim=dim)
    if step == 1:
        start, stop = (each + cut.numel * (each < 0) for each in (start, stop))
        return replace(cut.between(start, stop, by_number=True), dim=dim)
    if len(cut.sizes) == 1 and cut.numel % step == 0 and 0 <= start < step and ends_there:
        return replace(cut, dim=dim, sizes=(cut.numel // step,), heads=(None,))  # every second one, say: of neighbours
    raise Mixed(cut, TAKES)


def _taken(index: Any, old: int, new: int, dim: int) -> tuple[Any, int]:
    """What an index of a tensor of `old` dims takes of a dim, and, of a slice, which of the `new` ones that is."""
    entries = [each for each in _entries(index, old) if dim in each[1] or not _is_number(each[0])]
    at = next(place for place, (_, dims) in enumerate(entries) if dim in dims)
    kept = [place for place, (each, _) in enumerate(entries) if each is None or isinstance(each, slice)]
    chosen = [place for place in range(len(entries)) if place not in kept]
    are_apart = bool(chosen) and len(chosen) <= chosen[-1] - chosen[0]  # then their dims come first
    before = new - len(kept) if are_apart or (chosen and chosen[0] < at) else 0
    return entries[at][0], before + sum(place < at for place in kept)


def _entries(index: Any, count: int) -> list[tuple[Any, range]]:
    """What an index takes, each with the dims of which."""
    given = [*index] if isinstance(index, tuple) else [index]
    at = next((place for place, each in enumerate(given) if each is Ellipsis), len(given))
    rest = given[:at] + given[at + 1 :]
    entries, dim = [], 0
    for each in [*given[:at], *[slice(None)] * (count - sum(map(_dims_of, rest))), *given[at + 1 :]]:
        entries.append((each, range(dim, dim + _dims_of(each))))
        dim += _dims_of(each)
    return entries


def _dims_of(index: Any) -> int:
    """How many dims an index takes up: a mask has its own."""
    return 0 if index is None or isinstance(index, bool) else int(index.dim()) if _is_mask(index) else 1


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _is_number(index: Any) -> bool:
    """Whether it takes one element, which torch does before all else."""
    return isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0)
