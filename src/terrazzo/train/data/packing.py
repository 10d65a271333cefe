"""Whole documents in sequences of fixed length: one each, or as many as fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from terrazzo.train.data.cache import TokenCache

__all__ = ["PackedRows", "Packing", "TooLong", "arrange", "learns_within"]

Packing = Literal["stream", "whole", "single"]
TooLong = Literal["truncate", "drop"]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedRows:
    """Documents, or their beginnings, in rows: `[starts[i], stops[i])` of the cache, in the order of the rows.

    Row `r` holds those numbered `[bounds[r], bounds[r + 1])`. `cut` of them lost their end, `dropped` documents are in
    no row, and of `cut_unlearnt` the part that is left had nothing to learn, so that they are in none either; of
    `cut_equal` preference pairs two equal texts were left.
    """

    starts: Integers
    stops: Integers
    bounds: Integers
    cut: int = 0
    dropped: int = 0
    cut_unlearnt: int = 0
    cut_equal: int = 0


def arrange(
    cache: TokenCache, chosen: npt.NDArray[np.bool_], room: int, packing: Packing, too_long: TooLong
) -> PackedRows:
    """The rows of the `chosen` documents, none of more than `room` tokens; none at all where nothing fits."""
    starts = np.concatenate(([0], cache.ends[:-1]))[chosen]
    stops = cache.ends[chosen]
    long = stops - starts > room
    if too_long == "drop":
        rows = PackedRows(starts[~long], stops[~long], np.zeros(1, np.int64), dropped=int(long.sum()))
    else:
        stops = np.minimum(stops, starts + room)
        learns = _first_learnable(cache, starts) < stops
        unlearnt = int((~learns).sum())
        rows = PackedRows(starts[learns], stops[learns], np.zeros(1, np.int64), int((long & learns).sum()), 0, unlearnt)
    if not len(rows.starts):
        return rows
    if packing == "single":
        return replace(rows, bounds=np.arange(len(rows.starts) + 1))
    order, bounds = best_fit(rows.stops - rows.starts, room)
    return replace(rows, starts=rows.starts[order], stops=rows.stops[order], bounds=bounds)


def learns_within(cache: TokenCache, room: int, too_long: TooLong) -> npt.NDArray[np.bool_]:
    """Which documents have something to learn in a row of `room` tokens, whole or as much of them as is kept."""
    starts = np.concatenate(([0], cache.ends[:-1]))
    within: npt.NDArray[np.bool_] = cache.ends - starts <= room
    return within if too_long == "drop" else _first_learnable(cache, starts) < np.minimum(cache.ends, starts + room)


def _first_learnable(cache: TokenCache, starts: Integers) -> Integers:
    """The place in the cache of the first token to learn at or after each of `starts`; every document has one."""
    if cache.spans is None:
        return starts
    first: Integers = cache.spans[np.searchsorted(cache.spans[:, 0], starts), 0]
    return first


def best_fit(lengths: Integers, room: int) -> tuple[Integers, Integers]:
    """Longest first, each into the fullest row that has room for it: the order by rows, and where each row begins."""
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # numbers of rows by the tokens that still fit into them
    spaces: list[int] = []  # its keys, sorted
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        at = bisect_left(spaces, length)
        if at == len(spaces):
            rows.append([index])
            row, space = len(rows) - 1, room
        else:
            space = spaces[at]
            row = with_space[space].pop()
            rows[row].append(index)
            if not with_space[space]:
                del with_space[space], spaces[at]
        if left := space - length:
            if left not in with_space:
                with_space[left] = []
                insort(spaces, left)
            with_space[left].append(row)
    bounds = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    return np.array([index for row in rows for index in row]), bounds
