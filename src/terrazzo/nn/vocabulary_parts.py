"""A vocabulary of which each rank has a part: places of tokens in a part, and the softmax over all parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["SoftmaxTerms", "VocabularyParts", "outside_part", "places_in_part", "softmax_terms"]


class VocabularyParts(Protocol):
    """Ranks that each have some consecutive entries of a vocabulary.

    Attributes:
        start: the first entry that this rank has.
        vocabulary: entries that all ranks have together.
    """

    start: int
    vocabulary: int

    def maximum(self, values: Tensor) -> Tensor:
        """The elementwise maximum over the ranks. Collective."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """The elementwise sum over the ranks, in rank order. Collective."""


def outside_part(indices: Tensor, start: int, stop: int, count: int) -> Tensor:
    """Which of `indices` are other ranks', where this rank has the rows from `start` to `stop` of `count`."""
    return ((indices >= 0) & (indices < start)) | ((indices >= stop) & (indices < count))


def places_in_part(indices: Tensor, start: int, stop: int, count: int) -> tuple[Tensor, Tensor]:
    """The place of each index in this rank's part, 0 where it is another rank's; and which are other ranks'.

    An index that no rank has stays out of range, so that torch refuses it. Arguments as of `outside_part`.
    """
    elsewhere = outside_part(indices, start, stop, count)
    return (indices - start).masked_fill(elsewhere, 0), elsewhere


@dataclass(frozen=True)
class SoftmaxTerms:
    """The terms of a softmax over all parts of the vocabulary, for positions `[N]`.

    Attributes:
        exponentials: `exp(logit - highest)` of this rank's part, `[N, part of the vocabulary]`.
        highest: the highest logit.
        total: the sum of all exponentials.
        chosen: the logit of the target.
        spread: the sum of all logits, where it was asked for.
    """

    exponentials: Tensor
    highest: Tensor
    total: Tensor
    chosen: Tensor
    spread: Tensor | None


def softmax_terms(
    logits: Tensor, places: Tensor, elsewhere: Tensor, parts: VocabularyParts | None, with_spread: bool = False
) -> SoftmaxTerms:
    """The terms for `logits`, `[..., part of the vocabulary]`, which become the exponentials in place.

    Args:
        logits: in fp32 or fp64.
        places: of the targets in this rank's part, int64 `[...]`.
        elsewhere: bool `[...]`, where the target is not in this rank's part.
        parts: the ranks that have the rest. Collective then; None where this rank has all logits.
    """
    chosen = logits.gather(-1, places.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
    spread = logits.sum(dim=-1) if with_spread else None
    highest = logits.amax(dim=-1)
    highest = parts.maximum(highest) if parts else highest
    total = logits.sub_(highest.unsqueeze(-1)).exp_().sum(dim=-1)
    if parts:
        own = [total, chosen] if spread is None else [total, chosen, spread]
        total, chosen, *spreads = parts.all_reduce(torch.stack(own))
        spread = spreads[0] if spreads else None
    return SoftmaxTerms(logits, highest, total, chosen, spread)
