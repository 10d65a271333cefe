"""Preference pairs as samples: two documents in a row of the cache, each in a sequence of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from terrazzo.train.data.cache import TokenCache
from terrazzo.train.data.packing import PackedRows, TooLong, arrange, learns_within
from terrazzo.train.data.sequences import NO_SEQUENCE, Batch, Indices, SequenceDataset, held_out_whole

__all__ = ["PairDataset", "arrange_pairs", "held_out_pairs"]


def held_out_pairs(cache: TokenCache, fraction: float) -> npt.NDArray[np.bool_]:
    """Which documents are for validation: whole pairs of them, see `held_out_whole`."""
    ends = cache.ends[1::2]
    return np.repeat(held_out_whole(replace(cache, ends=ends, name_hashes=cache.name_hashes[::2]), fraction), 2)


def arrange_pairs(cache: TokenCache, chosen: npt.NDArray[np.bool_], room: int, too_long: TooLong) -> PackedRows:
    """A row for each of the `chosen` documents whose pair fits: both, or with `truncate` a part of both completions.

    Pairs that would be cut to two equal texts are left out: nothing is preferred there.
    """
    fits = learns_within(cache, room, too_long).reshape(-1, 2).all(axis=1).repeat(2)
    left_out = int((chosen & ~fits).sum()) // 2
    if too_long == "drop":
        return replace(arrange(cache, chosen & fits, room, "single", too_long), dropped=left_out)
    differs = ~_cut_equal(cache, chosen & fits, room).repeat(2)
    equal = int((chosen & fits & ~differs).sum()) // 2
    rows = arrange(cache, chosen & fits & differs, room, "single", too_long)
    return replace(rows, cut_unlearnt=left_out, cut_equal=equal)


def _cut_equal(cache: TokenCache, chosen: npt.NDArray[np.bool_], room: int) -> npt.NDArray[np.bool_]:
    """Which of the `chosen` pairs have texts that are equal in their first `room` tokens, `[pairs]`."""
    starts = np.concatenate(([0], cache.ends[:-1])).reshape(-1, 2)
    lengths = np.minimum(cache.ends.reshape(-1, 2) - starts, room)
    # Shorter ones were compared as the cache was written.
    equal: npt.NDArray[np.bool_] = chosen[::2] & (lengths == room).all(axis=1)
    for pair in np.flatnonzero(equal):
        one, other = (cache.tokens[start : start + room] for start in starts[pair])
        equal[pair] = np.array_equal(one, other)
    return equal


class PairDataset(SequenceDataset):
    """Samples of two sequences: pair `i` is the rows 2 i, the chosen one, and 2 i + 1.

    Attributes:
        reference: fp32 `[pairs, 2]`, log-probabilities of the completions under the initial model, once they are known.
    """

    reference: Tensor | None = None

    def __len__(self) -> int:
        """Number of pairs."""
        return self.rows_numel // 2

    def valid_tokens(self, indices: Indices) -> int:
        """Number of tokens in the completions of all these pairs."""
        return super().valid_tokens(_rows_of(indices))

    def input_tokens(self, indices: Indices) -> int:
        """Number of inputs, over both rows of all these pairs, that are tokens."""
        return super().input_tokens(_rows_of(indices))

    def samples(self, indices: Indices) -> int:
        """Pairs that are none to fill a batch."""
        return int((indices != NO_SEQUENCE).sum())

    def batch(self, indices: Indices) -> Batch:
        """The pairs `indices` as one batch `[2 B, T]`, with the reference where it is known."""
        batch = super().batch(_rows_of(indices))
        reference = None if self.reference is None else self.reference[torch.from_numpy(np.maximum(indices, 0))]
        return replace(batch, samples=self.samples(indices), reference=reference)


def _rows_of(pairs: Indices) -> Indices:
    rows = np.stack((2 * pairs, 2 * pairs + 1), axis=1)
    rows[pairs == NO_SEQUENCE] = NO_SEQUENCE
    return rows.reshape(-1)
