"""Documents packed into sequences of fixed length, read from the token cache when asked for."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from terrazzo.train.data.cache import TokenCache
from terrazzo.train.data.packing import PackedRows
from terrazzo.train.data.tokenizer import TokenArray

__all__ = [
    "IGNORED",
    "NO_SEQUENCE",
    "Batch",
    "Indices",
    "SequenceDataset",
    "cut_at_documents",
    "held_out_whole",
    "split_documents",
    "split_of",
]

IGNORED = -100
"""The target that torch's `cross_entropy` leaves out."""
NO_SEQUENCE = -1

Indices = npt.NDArray[np.integer[Any]]
"""Numbers of samples, or positions in a stream."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. `inputs` and `targets` are int64 `[B, T]` on the CPU, targets one token ahead.

    `valid_tokens` counts the targets that are not `IGNORED`; it may be 0. `samples` counts what a loss is the mean of:
    these tokens, or preference pairs, of which each is two rows. `reference`, fp32 `[B / 2, 2]`, are log-probabilities
    of the pairs' completions under the initial model. `positions`, int64 `[B, T]`, count from 0 in each document, of
    whole sequences where ranks share these; None where attention is not cut between documents. `prefixes`, int64
    `[B, T]`, likewise of whole sequences, say of each token how many tokens its document's prompt has; None where
    attention is causal. `padding_mask`, bool `[B, T]`, is True where an input only fills its row; None where none does.
    """

    inputs: Tensor
    targets: Tensor
    valid_tokens: int
    samples: int
    reference: Tensor | None = None
    positions: Tensor | None = None
    prefixes: Tensor | None = None
    padding_mask: Tensor | None = None


@dataclass(frozen=True)
class Split:
    """A part of a cache: the token ranges `[starts[i], stops[i])` in order, from `text_bytes` of UTF-8."""

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    text_bytes: int


def split_documents(cache: TokenCache, validation_fraction: float) -> tuple[Split, Split | None]:
    """Training and validation parts; they depend on the documents' names and lengths only, never on a seed.

    Whole documents, in the order of their names' hashes, go to validation until it has its share of the
    tokens. Where every document is larger than that share (a single file, say), the last share of all tokens
    is taken instead.
    """
    chosen = _held_out(cache, validation_fraction)
    if chosen is None:
        total = int(cache.ends[-1])
        return _split_tail(cache, total - int(total * validation_fraction))
    return split_of(cache, ~chosen), split_of(cache, chosen) if chosen.any() else None


def _held_out(cache: TokenCache, fraction: float) -> npt.NDArray[np.bool_] | None:
    """Which whole documents are held out for validation; None if each is larger than the share of the tokens."""
    lengths = np.diff(cache.ends, prepend=0)
    share = int(int(cache.ends[-1]) * fraction)
    chosen = np.zeros(len(lengths), dtype=bool)
    if share == 0:
        return chosen
    if lengths.min() > share:
        return None
    order = np.argsort(cache.name_hashes, kind="stable")
    order = order[lengths[order] <= share]
    before = np.cumsum(lengths[order]) - lengths[order]
    chosen[order[before < share]] = True
    return chosen


def held_out_whole(cache: TokenCache, fraction: float) -> npt.NDArray[np.bool_]:
    """`_held_out`, or the shortest document if all are larger than the share. One is always left for training."""
    chosen = _held_out(cache, fraction)
    if chosen is None:
        lengths = np.diff(cache.ends, prepend=0)
        chosen = np.zeros(len(lengths), dtype=bool)
        chosen[int(lengths.argmin())] = len(lengths) > 1
    return chosen


def split_of(cache: TokenCache, chosen: npt.NDArray[np.bool_]) -> Split:
    """The chosen documents, neighbours merged into one range."""
    edges = np.diff(np.concatenate(([0], chosen.astype(np.int8), [0])))
    bounds = np.concatenate(([0], cache.ends))
    return Split(bounds[edges == 1], bounds[edges == -1], int(cache.text_bytes[chosen].sum()))


def _split_tail(cache: TokenCache, position: int) -> tuple[Split, Split]:
    """All tokens before and after `position`; text bytes in proportion to the tokens."""
    total, total_bytes = int(cache.ends[-1]), int(cache.text_bytes.sum())
    ahead_bytes = round(total_bytes * position / total)
    ahead = Split(np.array([0]), np.array([position]), ahead_bytes)
    return ahead, Split(np.array([position]), np.array([total]), total_bytes - ahead_bytes)


def cut_at_documents(cache: TokenCache, split: Split) -> Split:
    """The same tokens, in a range for each document."""
    before = np.searchsorted(split.starts, cache.ends) - 1  # the range that begins ahead of each end
    cuts = cache.ends[(before >= 0) & (cache.ends < split.stops[np.maximum(before, 0)])]
    starts, stops = (np.sort(np.concatenate((edges, cuts))) for edges in (split.starts, split.stops))
    return Split(starts, stops, split.text_bytes)


class _Spans:
    """Ranges `[starts[i], stops[i])` of a stream, in order and apart from each other."""

    def __init__(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> None:
        self.starts, self.stops = starts, stops
        self.before = np.concatenate(([0], np.cumsum(stops - starts)))

    def between(self, starts: Indices, stops: Indices) -> int:
        """How many of the positions in the ranges `[starts[i], stops[i])`, none of them reversed, are in spans."""
        return int((self.ahead_of(stops) - self.ahead_of(np.minimum(starts, stops))).sum())

    def ahead_of(self, positions: Indices) -> Indices:
        """How many positions before each of `positions` are in spans."""
        if not len(self.starts):
            return np.zeros_like(positions)
        span = np.searchsorted(self.starts, positions, side="right")
        inside = np.where(span > 0, positions - self.stops[span - 1], 0)  # less than 0 within a span
        return self.before[span] + np.minimum(inside, 0)

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Which of the positions `[start, stop)` are in spans."""
        mask = np.zeros(max(0, stop - start), dtype=bool)
        first = int(np.searchsorted(self.stops, start, side="right"))
        last = int(np.searchsorted(self.starts, stop, side="left"))
        for begin, end in zip(self.starts[first:last], self.stops[first:last], strict=True):
            mask[max(0, int(begin) - start) : int(end) - start] = True
        return mask


class SequenceDataset:
    """The tokens of a split in sequences of `sequence_length` inputs with the same number of targets.

    The documents, each closed by an end-of-document token, form one stream. Sequence `i` has the inputs
    `[i T, (i + 1) T)` and the targets one further, so every token but the very first is a target exactly
    once; what the last sequence lacks is `IGNORED`. Sequences run over document borders.

    With `rows` the stream is that of its documents, and sequence `i` is row `i`, of up to T + 1 tokens; the rest is
    `IGNORED`. The first token of a document in a row is no target.

    Where the cache has spans, only tokens in them are targets.

    With `apart` no document is seen from another: batches have positions, and the first token of a document is no
    target. The split, if there are no rows, then has a range for each document (see `cut_at_documents`).

    Attributes:
        prompted: batches have the lengths of prompts: what is before the first learnt token of a document, or of the
            piece of it that a sequence has; of the whole sequence where documents are not apart.
    """

    prompted: bool = False

    def __init__(
        self,
        cache: TokenCache,
        split: Split,
        sequence_length: int,
        end_of_document: int,
        rows: PackedRows | None = None,
        apart: bool = False,
    ) -> None:
        self.cache, self.split, self.rows, self.apart = cache, split, rows, apart
        self.sequence_length, self.end_of_document = sequence_length, end_of_document
        self.starts, self.stops = (split.starts, split.stops) if rows is None else (rows.starts, rows.stops)
        self.offsets = np.concatenate(([0], np.cumsum(self.stops - self.starts)))
        self.tokens_numel = int(self.offsets[-1])
        self.row_bounds = None if rows is None else self.offsets[rows.bounds]
        self.learnable = self.learnt_spans()

    def __len__(self) -> int:
        """Number of samples, which are sequences here."""
        return self.rows_numel

    @property
    def rows_numel(self) -> int:
        """Number of sequences."""
        if self.row_bounds is not None:
            return len(self.row_bounds) - 1
        return max(0, -(-(self.tokens_numel - 1) // self.sequence_length))

    def learnt_spans(self) -> _Spans | None:
        """What is learnt, as ranges of the stream; None for all of it."""
        # The beginning of a document in a row, or apart from others, does not follow from another's end.
        first = 1 if self.apart or self.rows is not None else 0
        if self.cache.spans is None:
            return None if not first else _Spans(self.offsets[:-1] + first, self.offsets[1:])
        begins, ends = self.cache.spans.T
        order = np.argsort(self.starts, kind="stable")
        index = np.searchsorted(self.stops[order], begins, side="right")
        begins, ends, piece = begins[index < len(order)], ends[index < len(order)], order[index[index < len(order)]]
        begins, ends = np.maximum(begins, self.starts[piece] + first), np.minimum(ends, self.stops[piece])
        shift = self.offsets[piece] - self.starts[piece]
        inside = begins < ends
        begins, ends = (begins + shift)[inside], (ends + shift)[inside]
        order = np.argsort(begins)
        return _Spans(begins[order], ends[order])

    @cached_property
    def targets_numel(self) -> int:
        """Targets of all sequences that are not ignored."""
        if self.learnable is None:
            return max(0, self.tokens_numel - 1)
        return self.learnable.between(np.array([1]), np.array([max(1, self.tokens_numel)]))

    @cached_property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes per learnt token, end-of-document tokens included: bits per byte = loss / ln 2 / this."""
        if self.cache.spans is None:
            return self.split.text_bytes / int((self.split.stops - self.split.starts).sum())
        return self.split.text_bytes / _Spans(*self.cache.spans.T).between(self.split.starts, self.split.stops)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the sequences: equal exactly where every sequence has the same tokens and targets."""
        ranges = zlib.crc32(np.stack((self.starts, self.stops)).astype("<i8").tobytes())
        parts: list[int | str] = [self.cache.crc, self.cache.header.tokens_numel, ranges, self.sequence_length]
        if self.rows is not None:
            parts.append(zlib.crc32(self.rows.bounds.astype("<i8").tobytes()))
        if self.apart:
            parts.append("apart")
        return f"{zlib.crc32(json.dumps(parts).encode()):08x}{self.cache.crc:08x}"

    def valid_tokens(self, indices: Indices) -> int:
        """Number of targets, over all these sequences, that are not ignored."""
        real = indices[indices != NO_SEQUENCE]
        starts, stops = self.bounds(real)
        if self.learnable is None:
            return int((stops - starts - 1).sum())
        return self.learnable.between(starts + 1, stops)

    def input_tokens(self, indices: Indices) -> int:
        """Number of inputs, over all these sequences, that are tokens: learnt or not, and none to fill a row."""
        starts, stops = self.bounds(indices[indices != NO_SEQUENCE])
        return int(np.minimum(stops - starts, self.sequence_length).sum())

    def samples(self, indices: Indices) -> int:
        """What the mean loss of all these sequences is a mean of: their targets."""
        return self.valid_tokens(indices)

    def bounds(self, indices: Indices) -> tuple[Indices, Indices]:
        """Where in the stream these sequences begin and end; the first token of each is no target."""
        if self.row_bounds is not None:
            return self.row_bounds[indices], self.row_bounds[indices + 1]
        starts = indices * self.sequence_length
        return starts, np.minimum(starts + self.sequence_length + 1, self.tokens_numel)

    def batch(self, indices: Indices) -> Batch:
        """The sequences `indices` as one batch; `NO_SEQUENCE` gives a row whose targets are all ignored."""
        rows = np.full((len(indices), self.sequence_length + 1), IGNORED, dtype=np.int64)
        bounds = np.stack(self.bounds(np.maximum(indices, 0)), axis=1)
        bounds[indices == NO_SEQUENCE] = 0
        real = [row for row, index in enumerate(indices.tolist()) if index != NO_SEQUENCE]
        for row in real:
            start, stop = bounds[row]
            rows[row, : stop - start] = self.read(start, stop - start)
        padding_mask = rows[:, :-1] == IGNORED
        inputs = np.where(padding_mask, self.end_of_document, rows[:, :-1])
        targets = np.ascontiguousarray(rows[:, 1:])
        if self.learnable is not None:
            for row in real:
                start, stop = bounds[row]
                targets[row, : stop - start - 1][~self.learnable.mask(start + 1, stop)] = IGNORED
        valid_tokens = int((targets != IGNORED).sum())
        positions = self.positions(bounds) if self.apart else None
        prefixes = _prefixes(targets, positions) if self.prompted else None
        given = (torch.from_numpy(inputs), torch.from_numpy(targets), valid_tokens, valid_tokens)
        further = (positions, prefixes, padding_mask if padding_mask.any() else None)
        return Batch(*given, None, *(None if each is None else torch.from_numpy(each) for each in further))

    def positions(self, bounds: Indices) -> Indices:
        """The position of each token in its document, or in the fill, for sequences at `bounds` `[B, 2]`: `[B, T]`."""
        positions = np.tile(np.arange(self.sequence_length), (len(bounds), 1))
        for row, (start, stop) in enumerate(bounds):
            tokens = np.arange(start, min(stop, start + self.sequence_length))
            document = np.searchsorted(self.offsets, tokens, side="right") - 1
            positions[row, : len(tokens)] = tokens - np.maximum(self.offsets[document], start)
            positions[row, len(tokens) :] -= len(tokens)
        return positions

    def read(self, start: int, numel: int) -> TokenArray:
        """Up to `numel` tokens of the stream from `start`: fewer only at its end."""
        stop = min(start + numel, self.tokens_numel)
        part = int(np.searchsorted(self.offsets, start, side="right")) - 1
        pieces: list[TokenArray] = []
        while start < stop:
            here = int(self.starts[part]) + start - int(self.offsets[part])
            until = min(stop, int(self.offsets[part + 1]))
            pieces.append(self.cache.tokens[here : here + until - start])
            start, part = until, part + 1
        return np.concatenate(pieces)


def _prefixes(targets: Indices, positions: Indices | None) -> Indices:
    """Of each token how many inputs its document has up to where its first target is learnt; 0 where none is: `[B, T]`.

    No learnt target is among these inputs: that of the last is the token behind them.
    """
    columns = np.arange(targets.shape[1])
    starts = np.zeros_like(targets) if positions is None else columns - positions
    learnt = np.where(targets != IGNORED, columns, targets.shape[1])
    next_learnt = np.minimum.accumulate(learnt[:, ::-1], axis=1)[:, ::-1]
    first = np.take_along_axis(next_learnt, starts, axis=1)
    inside = np.minimum(first, targets.shape[1] - 1)
    is_own = (first < targets.shape[1]) & (np.take_along_axis(starts, inside, axis=1) == starts)
    return np.where(is_own, first - starts + 1, 0)
