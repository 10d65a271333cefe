"""Which tokens see which, as tiles of queries and keys: no mask is ever as large as a sequence squared.

A tile is computed without a mask where its queries see all of its keys, or a triangle of them. Of a sliding window the
keys behind the last query that sees them are such a triangle too. Of prompts whose tokens see each other in both
directions (prefix LM: Raffel et al., arXiv 1910.10683, section 3.2.1) the tile in which one ends has a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from terrazzo.parallel.context.attention_kernels import ROWS, VisibleKeys
from terrazzo.parallel.context.chunks import TokenRun

__all__ = ["WINDOW_ROWS", "AttentionMask", "AttentionTile"]

AttentionTile = tuple[slice, slice, VisibleKeys]
"""Queries and keys, by their offsets, and which keys each query sees."""

WINDOW_ROWS = 256
"""Queries at a time within a sliding window: the fewer, the fewer keys are computed that no query of them sees."""


ANYWHERE = 2**62
"""A place behind every sequence's end: where a prefix may end that nobody knows."""


class BlockBounds(NamedTuple):
    """What is known of neighbouring tokens, over the batch.

    Attributes:
        low, high: the least and the greatest place where a document of theirs begins.
        near, far: the least and the greatest place behind a prefix of theirs; 0 without prefixes.
    """

    low: int = 0
    high: int = 0
    near: int = 0
    far: int = 0


@dataclass(frozen=True)
class AttentionMask:
    """What the tokens that a rank computes see: those of their own document up to themselves, or some of these.

    With prefixes also those behind them, as far as their document's prefix goes.

    Attributes:
        runs: where the tokens are in the sequence, one run behind the other.
        begins: the place where each token's document begins, int64 `[B, tokens]`; None where all see the sequence from
            its start.
        prefix_ends: the place behind the prefix of each token's document, int64 `[B, tokens]`; None without prefixes.
        bounds: of each block of tokens of a run; empty where neither documents nor prefixes are given.
        window: how many tokens one sees at most, itself among them; None for all.
        stride: beyond the window a token sees each whose distance is a multiple of it; None for none.
    """

    runs: tuple[TokenRun, ...]
    begins: Tensor | None = None
    prefix_ends: Tensor | None = None
    bounds: tuple[BlockBounds, ...] = ()
    window: int | None = None
    stride: int | None = None

    @classmethod
    def of(
        cls,
        runs: Sequence[TokenRun],
        begins: Tensor | None,
        host_begins: Tensor | None = None,
        window: int | None = None,
        stride: int | None = None,
    ) -> AttentionMask:
        """The mask for tokens whose documents begin at `begins`, which is left out where all begin at the start.

        Args:
            host_begins: the values of `begins`, in host memory; needed with these.
            window: left out where no token is so far from the start.
            stride: of what is seen beyond the window.
        """
        if window is None or window >= max(run.end for run in runs):
            window = stride = None
        assert (begins is None) == (host_begins is None), "the host knows where documents begin"
        if begins is None or host_begins is None or not host_begins.any():
            return cls(tuple(runs), window=window, stride=stride)
        blocks = [rows for run in runs for rows in _blocks(run, window)]
        bounds = tuple(BlockBounds(*pair) for pair in _extremes(host_begins, blocks))
        return cls(tuple(runs), begins, None, bounds, window, stride)

    @property
    def batch(self) -> int | None:
        """Of how many sequences it is; None where it is the same for any."""
        of_each = self.begins if self.prefix_ends is None else self.prefix_ends
        return None if of_each is None else of_each.shape[0]

    def with_prefixes(self, prefix_ends: Tensor, host_ends: Tensor) -> AttentionMask:
        """The same, without a window, where a document's tokens before `prefix_ends` see each other.

        Args:
            host_ends: the values of `prefix_ends`, in host memory.
        """
        blocks = [rows for run in self.runs for rows in _blocks(run)]
        begun = self.bounds or (BlockBounds(),) * len(blocks)
        pairs = zip(begun, _extremes(host_ends, blocks), strict=True)
        return replace(self, prefix_ends=prefix_ends, bounds=tuple(BlockBounds(*it[:2], *ends) for it, ends in pairs))

    def of_unknown(self) -> AttentionMask:
        """The same of any documents and prefixes: with bounds that hold whatever their values are."""
        if self.begins is None and self.prefix_ends is None:
            return self
        far = 0 if self.prefix_ends is None else ANYWHERE
        blocks = [rows for run in self.runs for rows in _blocks(run, self.window)]
        return replace(self, bounds=tuple(BlockBounds(0, rows.end, 0, far) for rows in blocks))

    def tiles(self, keys: Sequence[TokenRun], device: torch.device) -> Iterator[AttentionTile]:
        """The tiles in which some queries see some keys; `keys` are where the keys are, `device` that of both."""
        bounds = iter(self.bounds)
        for queries in self.runs:
            if self.begins is None and self.prefix_ends is None and self.window is None:
                for run in keys:
                    yield from _causal(queries, run)
                continue
            blocks = [(rows, next(bounds, BlockBounds())) for rows in _blocks(queries, self.window)]
            for rows, of_rows in blocks:
                for run in keys:
                    of_block = self._of_block if self.prefix_ends is None else self._of_prefixes
                    yield from of_block(rows, run, of_rows, device)
            if self.stride is not None:
                for run in keys:
                    yield from self._of_strides(queries, run, blocks, self.stride)

    def _of_block(
        self, rows: TokenRun, keys: TokenRun, bounds: BlockBounds, device: torch.device
    ) -> Iterator[AttentionTile]:
        """The tiles of neighbouring queries."""
        low, high, *_ = bounds
        behind = 0 if self.window is None else rows.place - self.window + 1  # the first that the first of them sees
        start, stop = max(keys.place, low, behind), min(keys.end, rows.end)
        if start >= stop:
            return
        queries, columns = _queries(rows), partial(_columns, keys)
        all_see_first = high <= start and (self.window is None or rows.end - self.window <= start)
        if all_see_first and stop <= rows.place:
            yield queries, columns(start, stop), "all"
        elif self.window is not None and all_see_first and start <= rows.place and stop == rows.end:
            if start < rows.place:
                yield queries, columns(start, rows.place), "all"
            yield queries, columns(rows.place, rows.end), "causal"
        elif self.window is not None and high <= behind == start and stop == rows.end and self.window > rows.length:
            far = start + rows.length
            yield queries, columns(start, far), "anticausal"
            if far < rows.place:
                yield queries, columns(far, rows.place), "all"
            yield queries, columns(rows.place, rows.end), "causal"
        else:
            yield queries, columns(start, stop), self._mask(rows, queries, start, stop, device)

    def _of_prefixes(
        self, rows: TokenRun, keys: TokenRun, bounds: BlockBounds, device: torch.device
    ) -> Iterator[AttentionTile]:
        """The tiles of neighbouring queries whose documents have prefixes: the keys before them, then the others."""
        queries, columns = _queries(rows), partial(_columns, keys)
        stop = min(keys.end, max(rows.end, bounds.far))
        all_see_until = max(rows.place, bounds.near)
        start = max(keys.place, bounds.low)
        if bounds.high <= start < (split := min(stop, all_see_until)):
            yield queries, columns(start, split), "all"
            start = split
        if start >= stop:
            return
        of_triangle = bounds.high <= start == rows.place and stop == rows.end and bounds.far <= rows.place + 1
        yield queries, columns(start, stop), "causal" if of_triangle else self._mask(rows, queries, start, stop, device)

    def _mask(self, rows: TokenRun, queries: slice, start: int, stop: int, device: torch.device) -> Tensor:
        """Bool `[B, 1, queries, keys]`; with documents alike in all sequences, B is 1."""
        places = torch.arange(rows.place, rows.end, device=device).unsqueeze(-1)
        of_keys = torch.arange(start, stop, device=device)
        mask = of_keys <= places
        if self.prefix_ends is not None:
            mask = (mask | (of_keys < self.prefix_ends[:, queries].unsqueeze(-1))).unsqueeze(1)
            return mask if self.begins is None else mask & self._in_document(queries, of_keys)
        if self.window is not None:
            mask &= of_keys > places - self.window
        if self.begins is None:
            return mask.expand(1, 1, -1, -1)
        return mask & self._in_document(queries, of_keys)

    def _in_document(self, queries: slice, of_keys: Tensor) -> Tensor:
        """Whether keys, by their places, are not before the queries' documents: bool `[B, 1, queries, keys]`."""
        assert self.begins is not None
        return (of_keys >= self.begins[:, queries].unsqueeze(-1)).unsqueeze(1)

    def _of_strides(
        self, queries: TokenRun, keys: TokenRun, blocks: list[tuple[TokenRun, BlockBounds]], stride: int
    ) -> Iterator[AttentionTile]:
        """Beyond the window queries see the keys whose places leave the same remainder: triangles among these."""
        assert self.window is not None and keys.place == 0, "keys are whole sequences"
        gap = -(-self.window // stride)  # from a query to the nearest of them, in strides
        for remainder in range(min(stride, queries.end)):

            def steps(run: TokenRun, first: int, last: int, remainder: int = remainder) -> slice:
                start = run.offset - run.place + remainder + first * stride
                return slice(start, start + (last - first - 1) * stride + 1, stride)

            first, last = (-(-(place - remainder) // stride) for place in (queries.place, queries.end))
            first = max(first, gap)
            if first >= last:
                continue
            if self.begins is None:
                if first > gap:
                    yield steps(queries, first, last), steps(keys, 0, first - gap), "all"
                yield steps(queries, first, last), steps(keys, first - gap, last - gap), "causal"
                continue
            for start in range(first, last, ROWS):
                stop = min(start + ROWS, last)
                places = range(remainder + start * stride, remainder + stop * stride, stride)
                low = min(it.low for rows, it in blocks if rows.place <= places[-1] and places[0] < rows.end)
                least = max(0, -(-(low - remainder) // stride))
                if least >= stop - gap:
                    continue
                rows = steps(queries, start, stop)
                index = torch.arange(start, stop, device=self.begins.device).unsqueeze(-1)
                of_keys = torch.arange(least, stop - gap, device=self.begins.device)
                seen = (of_keys <= index - gap) & self._in_document(rows, of_keys * stride + remainder)
                yield rows, steps(keys, least, stop - gap), seen


def _queries(rows: TokenRun) -> slice:
    return slice(rows.offset, rows.offset + rows.length)


def _columns(keys: TokenRun, first: int, last: int) -> slice:
    """Where a run of keys has the places `[first, last)`."""
    return slice(keys.offset + first - keys.place, keys.offset + last - keys.place)


def _extremes(values: Tensor, blocks: Sequence[TokenRun]) -> list[list[int]]:
    """The least and the greatest of values `[B, tokens]` in each block."""
    found: list[list[int]] = torch.stack([torch.stack(values[:, _queries(rows)].aminmax()) for rows in blocks]).tolist()
    return found


def _blocks(run: TokenRun, window: int | None = None) -> list[TokenRun]:
    """A run in pieces of at most `ROWS` tokens, or fewer under a window."""
    size = ROWS if window is None else min(ROWS, WINDOW_ROWS)
    starts = range(0, run.length, size)
    return [TokenRun(run.offset + start, run.place + start, min(size, run.length - start)) for start in starts]


def _causal(queries: TokenRun, keys: TokenRun) -> Iterator[AttentionTile]:
    """All keys before the queries, and the queries themselves: no run of keys begins or ends inside of one of them."""
    rows = _queries(queries)
    if (before := min(keys.end, queries.place) - keys.place) > 0:
        yield rows, slice(keys.offset, keys.offset + before), "all"
    if keys.place <= queries.place < keys.end:
        own = keys.offset + queries.place - keys.place
        yield rows, slice(own, own + queries.length), "causal"
