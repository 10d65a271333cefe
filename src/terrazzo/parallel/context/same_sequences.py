"""Compares the sequences of which ranks have parts: parts of different ones would give wrong numbers, and no error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terrazzo.errors import RanksApart
from terrazzo.parallel.exchanges import AxisRanks
from terrazzo.parallel.input_fingerprints import DRAWN_BY_DATA_RANK, fingerprint_of, inputs_as_text

__all__ = ["SameSequences"]


class SameSequences:
    """What the ranks have split first, which they compare once, where their first exchange would begin.

    Args:
        skips: nothing is compared, as where there are no other ranks.
    """

    def __init__(self, ranks: AxisRanks, skips: bool) -> None:
        self._ranks, self._skips = ranks, skips
        self._first: tuple[int, str] | None = None  # in a number and in words

    def note(self, whole: Sequence[Tensor]) -> None:
        """These are split now."""
        if self._first is None and not self._skips:
            self._first = fingerprint_of(whole), inputs_as_text(whole)

    def compare(self) -> None:
        """Compare what was split first, if that has not been done. Collective then.

        Raises:
            RanksApart: on every rank, where it differs.
        """
        if torch.compiler.is_compiling() or self._skips:
            return
        number, words = self._first or (0, "none by context.split")
        if not self._ranks.agree_on(number):
            raise RanksApart(
                f"The ranks along cp were given other sequences (here {words}), and each has a part of the same ones:"
                f" give all of them the same batches, {DRAWN_BY_DATA_RANK}"
            )
        self._skips, self._first = True, None
