"""Which tokens see which, as tiles of queries and keys: no mask is ever as large as a sequence squared.

A tile is computed without a mask where its queries see all of its keys, or a triangle of them. Of a sliding window the
keys behind the last query that sees them are such a triangle too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.parallel.context.attention_kernels import ROWS, VisibleKeys
from terrazzo.parallel.context.chunks import TokenRun

__all__ = ["WINDOW_ROWS", "AttentionMask", "AttentionTile"]

AttentionTile = tuple[slice, slice, VisibleKeys]
"""Queries and keys, by their offsets, and which keys each query sees."""

WINDOW_ROWS = 256
"""Queries at a time within a sliding window: the fewer, the fewer keys are computed that no query of them sees."""


@dataclass(frozen=True)
class AttentionMask:
    """What the tokens that a rank computes see: those of their own document up to themselves, or some of these.

    Attributes:
        runs: where the tokens are in the sequence, one run behind the other.
        begins: the place where each token's document begins, int64 `[B, tokens]`; None where all see the sequence from
            its start.
        bounds: the least and the greatest of `begins` in each block of tokens of a run, over the batch.
        window: how many tokens one sees at most, itself among them; None for all.
        stride: beyond the window a token sees each whose distance is a multiple of it; None for none.
    """

    runs: tuple[TokenRun, ...]
    begins: Tensor | None = None
    bounds: tuple[tuple[int, int], ...] = ()
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
            host_begins: the values of `begins`, in host memory.
            window: left out where no token is so far from the start.
            stride: of what is seen beyond the window.
        """
        if window is None or window >= max(run.end for run in runs):
            window = stride = None
        if begins is None or host_begins is None or not host_begins.any():
            return cls(tuple(runs), window=window, stride=stride)
        blocks = [
            host_begins[:, rows.offset : rows.offset + rows.length] for run in runs for rows in _blocks(run, window)
        ]
        bounds = torch.stack([torch.stack(block.aminmax()) for block in blocks]).tolist()
        return cls(tuple(runs), begins, tuple((low, high) for low, high in bounds), window, stride)

    @classmethod
    def unknown(
        cls, runs: Sequence[TokenRun], begins: Tensor, window: int | None = None, stride: int | None = None
    ) -> AttentionMask:
        """As `of`, where the values of `begins` are not known."""
        bounds = [(0, rows.end) for run in runs for rows in _blocks(run, window)]
        return cls(tuple(runs), begins, tuple(bounds), window, stride)

    def tiles(self, keys: Sequence[TokenRun], device: torch.device) -> Iterator[AttentionTile]:
        """The tiles in which some queries see some keys; `keys` are where the keys are, `device` that of both."""
        bounds = iter(self.bounds)
        for queries in self.runs:
            if self.begins is None and self.window is None:
                for run in keys:
                    yield from _causal(queries, run)
                continue
            blocks = [(rows, next(bounds, (0, 0))) for rows in _blocks(queries, self.window)]
            for rows, (low, high) in blocks:
                for run in keys:
                    yield from self._of_block(rows, run, low, high, device)
            if self.stride is not None:
                for run in keys:
                    yield from self._of_strides(queries, run, blocks, self.stride)

    def _of_block(
        self, rows: TokenRun, keys: TokenRun, low: int, high: int, device: torch.device
    ) -> Iterator[AttentionTile]:
        """The tiles of neighbouring queries, whose documents begin from `low` to `high`."""
        behind = 0 if self.window is None else rows.place - self.window + 1  # the first that the first of them sees
        start, stop = max(keys.place, low, behind), min(keys.end, rows.end)
        if start >= stop:
            return
        queries = slice(rows.offset, rows.offset + rows.length)

        def columns(first: int, last: int) -> slice:
            return slice(keys.offset + first - keys.place, keys.offset + last - keys.place)

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

    def _mask(self, rows: TokenRun, queries: slice, start: int, stop: int, device: torch.device) -> Tensor:
        """Bool `[B, 1, queries, keys]`; with documents alike in all sequences, B is 1."""
        places = torch.arange(rows.place, rows.end, device=device).unsqueeze(-1)
        of_keys = torch.arange(start, stop, device=device)
        mask = of_keys <= places
        if self.window is not None:
            mask &= of_keys > places - self.window
        if self.begins is None:
            return mask.expand(1, 1, -1, -1)
        return (mask & (of_keys >= self.begins[:, queries].unsqueeze(-1))).unsqueeze(1)

    def _of_strides(
        self, queries: TokenRun, keys: TokenRun, blocks: list[tuple[TokenRun, tuple[int, int]]], stride: int
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
                low = min(low for rows, (low, _) in blocks if rows.place <= places[-1] and places[0] < rows.end)
                least = max(0, -(-(low - remainder) // stride))
                if least >= stop - gap:
                    continue
                rows = steps(queries, start, stop)
                index = torch.arange(start, stop, device=self.begins.device).unsqueeze(-1)
                of_keys = torch.arange(least, stop - gap, device=self.begins.device)
                in_document = of_keys * stride + remainder >= self.begins[:, rows].unsqueeze(-1)
                yield rows, steps(keys, least, stop - gap), ((of_keys <= index - gap) & in_document).unsqueeze(1)


def _blocks(run: TokenRun, window: int | None = None) -> list[TokenRun]:
    """A run in pieces of at most `ROWS` tokens, or fewer under a window."""
    size = ROWS if window is None else min(ROWS, WINDOW_ROWS)
    starts = range(0, run.length, size)
    return [TokenRun(run.offset + start, run.place + start, min(size, run.length - start)) for start in starts]


def _causal(queries: TokenRun, keys: TokenRun) -> Iterator[AttentionTile]:
    """All keys before the queries, and the queries themselves: no run of keys begins or ends inside of one of them."""
    rows = slice(queries.offset, queries.offset + queries.length)
    if (before := min(keys.end, queries.place) - keys.place) > 0:
        yield rows, slice(keys.offset, keys.offset + before), "all"
    if keys.place <= queries.place < keys.end:
        own = keys.offset + queries.place - keys.place
        yield rows, slice(own, own + queries.length), "causal"
