"""Where the tokens of a rank are, and which beginnings of documents and lengths of prefixes they can have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terrazzo.errors import Misuse
from terrazzo.parallel.context.chunks import TokenRun

__all__ = ["check_begins", "check_prefix", "places_of"]


def places_of(runs: Sequence[TokenRun], device: torch.device | None = None) -> Tensor:
    """The places in the sequence of the tokens of runs, int64 `[1, tokens]`."""
    return torch.cat([torch.arange(run.place, run.end, device=device) for run in runs]).unsqueeze(0)


def check_begins(runs: Sequence[TokenRun], begins: Tensor) -> None:
    """Refuse documents that begin before the sequence, or behind their own tokens.

    Args:
        runs: where the tokens are.
        begins: where each token's document begins, int64 `[B, tokens]` in host memory.

    Raises:
        Misuse: there.
    """
    if bool(((begins < 0) | (begins > places_of(runs))).any()):
        raise Misuse(
            "Positions run ahead of the places of their tokens in the sequence, so they are not those of these"
            " tokens: they count from 0 in each document. Split tokens and positions with one call of"
            " context.split(...)."
        )


def check_prefix(runs: Sequence[TokenRun], begins: Tensor, ends: Tensor, length: int) -> None:
    """Refuse prefixes that differ within a document, or end behind it, as far as neighbouring tokens tell.

    Args:
        runs: where the tokens are.
        begins: where each token's document begins, int64 `[B, tokens]` in host memory.
        ends: the place behind its prefix, likewise.
        length: of the sequence, in tokens.

    Raises:
        Misuse: there.
    """
    wrong = bool(((ends < begins) | (ends > length)).any())
    for run in runs:
        its_begins, its_ends = (each[:, run.offset : run.offset + run.length] for each in (begins, ends))
        apart = its_begins[:, 1:] != its_begins[:, :-1]
        last = torch.where(apart, its_begins[:, 1:], its_ends[:, 1:])
        wrong |= bool(torch.where(apart, its_ends[:, :-1] > last, its_ends[:, :-1] != last).any())
    if wrong:
        raise Misuse(
            "Prefix lengths are not those of these tokens: all tokens of a document have the same, from 0 up to its"
            " length. Split tokens, positions and lengths with one call of context.split(...)."
        )
