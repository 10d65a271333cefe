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
from terrazzo.train.data.tokenizer import TokenArray

__all__ = ["IGNORED", "Batch", "SequenceDataset", "Split", "split_documents"]

IGNORED = -100  # torch's cross_entropy leaves targets of this value out
NO_SEQUENCE = -1

Indices = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. `inputs` and `targets` are int64 `[B, T]` on the CPU, targets one token ahead.

    `valid_tokens` counts the targets that are not `IGNORED`; it may be 0.
    """

    inputs: Tensor
    targets: Tensor
    valid_tokens: int


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
    lengths = np.diff(cache.ends, prepend=0)
    total = int(cache.ends[-1])
    share = int(total * validation_fraction)
    if share == 0:
        return split_of(cache, np.ones(len(lengths), dtype=bool)), None
    if lengths.min() > share:
        return split_tail(cache, total - share)
    order = np.argsort(cache.name_hashes, kind="stable")
    order = order[lengths[order] <= share]
    before = np.cumsum(lengths[order]) - lengths[order]
    chosen = np.zeros(len(lengths), dtype=bool)
    chosen[order[before < share]] = True
    return split_of(cache, ~chosen), split_of(cache, chosen)


def split_of(cache: TokenCache, chosen: npt.NDArray[np.bool_]) -> Split:
    """The chosen documents, neighbours merged into one range."""
    edges = np.diff(np.concatenate(([0], chosen.astype(np.int8), [0])))
    bounds = np.concatenate(([0], cache.ends))
    return Split(bounds[edges == 1], bounds[edges == -1], int(cache.text_bytes[chosen].sum()))


def split_tail(cache: TokenCache, position: int) -> tuple[Split, Split]:
    """All tokens before and after `position`; text bytes in proportion to the tokens."""
    total, total_bytes = int(cache.ends[-1]), int(cache.text_bytes.sum())
    ahead_bytes = round(total_bytes * position / total)
    ahead = Split(np.array([0]), np.array([position]), ahead_bytes)
    return ahead, Split(np.array([position]), np.array([total]), total_bytes - ahead_bytes)


class SequenceDataset:
    """The tokens of a split in sequences of `sequence_length` inputs with the same number of targets.

    The documents, each closed by an end-of-document token, form one stream. Sequence `i` has the inputs
    `[i T, (i + 1) T)` and the targets one further, so every token but the very first is a target exactly
    once; what the last sequence lacks is `IGNORED`. Sequences run over document borders, and attention is not
    cut there.
    """

    def __init__(self, cache: TokenCache, split: Split, sequence_length: int, end_of_document: int) -> None:
        self.cache, self.split = cache, split
        self.sequence_length, self.end_of_document = sequence_length, end_of_document
        self.offsets = np.concatenate(([0], np.cumsum(split.stops - split.starts)))
        self.tokens_numel = int(self.offsets[-1])

    def __len__(self) -> int:
        """Number of sequences."""
        return max(0, -(-(self.tokens_numel - 1) // self.sequence_length))

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes per token, end-of-document tokens included: bits per byte = loss / ln 2 / this."""
        return self.split.text_bytes / self.tokens_numel

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the sequences: equal exactly where every sequence has the same tokens."""
        ranges = zlib.crc32(np.stack((self.split.starts, self.split.stops)).astype("<i8").tobytes())
        described = json.dumps([self.cache.crc, self.cache.header.tokens_numel, ranges, self.sequence_length])
        return f"{zlib.crc32(described.encode()):08x}{self.cache.crc:08x}"

    def valid_tokens(self, indices: Indices) -> int:
        """Number of targets, over all these sequences, that are not ignored."""
        left = self.tokens_numel - 1 - indices * self.sequence_length
        return int(np.where(indices == NO_SEQUENCE, 0, np.clip(left, 0, self.sequence_length)).sum())

    def batch(self, indices: Indices) -> Batch:
        """The sequences `indices` as one batch; `NO_SEQUENCE` gives a row whose targets are all ignored."""
        rows = np.full((len(indices), self.sequence_length + 1), IGNORED, dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            if index != NO_SEQUENCE:
                tokens = self.read(int(index) * self.sequence_length, self.sequence_length + 1)
                row[: len(tokens)] = tokens
        inputs = np.where(rows[:, :-1] == IGNORED, self.end_of_document, rows[:, :-1])
        targets = np.ascontiguousarray(rows[:, 1:])
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), self.valid_tokens(indices))

    def read(self, start: int, numel: int) -> TokenArray:
        """Up to `numel` tokens of the stream from `start`: fewer only at its end."""
        stop = min(start + numel, self.tokens_numel)
        part = int(np.searchsorted(self.offsets, start, side="right")) - 1
        pieces: list[TokenArray] = []
        while start < stop:
            here = int(self.split.starts[part]) + start - int(self.offsets[part])
            until = min(stop, int(self.offsets[part + 1]))
            pieces.append(self.cache.tokens[here : here + until - start])
            start, part = until, part + 1
        return np.concatenate(pieces)
