"""Compares the sequences of which ranks have parts: parts of different ones would give wrong numbers, and no error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.runtime.device import HOST
from terrazzo.errors import Misuse, RanksApart, TerrazzoError
from terrazzo.parallel.exchanges import AxisRanks
from terrazzo.parallel.input_fingerprints import (
    DRAWN_BY_DATA_RANK,
    compares_values,
    fingerprint_of,
    form_fingerprint,
    inputs_as_text,
)

__all__ = ["SameSequences"]

T = TypeVar("T")


class _Noted(threading.local):
    """What a thread has split since its last comparison, in a number and in words. Another one may split ahead of the
    forwards, at other moments on each rank: of that nothing is compared.
    """

    number, words = 0, "none by context.split"


class SameSequences:
    """What the ranks have split: compared where the first exchange of a forward would begin.

    Args:
        skips: nothing is compared, as where there are no other ranks.
    """

    def __init__(self, ranks: AxisRanks, skips: bool) -> None:
        self._ranks, self._skips, self._noted = ranks, skips, _Noted()
        self._is_due, self._before = True, False

    def note(self, whole: Sequence[Tensor]) -> None:
        """These are split now."""
        device = whole[0].device if whole else HOST
        if not self._skips and compares_values(device, self._before):
            self._noted.number = form_fingerprint([self._noted.number, fingerprint_of(whole)])
            self._noted.words = inputs_as_text(whole)

    def begin_forward(self) -> None:
        """A forward begins, in which the ranks compare what it is of, once."""
        self._is_due = True

    def compare_first(self) -> None:
        """Compare what was split first, if nothing has been compared. Collective then; raises as `agreed` does."""
        if not self._before:
            self.agreed(None, lambda: None)

    def agreed(self, positions: Tensor | None, read: Callable[[], T]) -> T:
        """What `read` returns, if it does on all ranks. Collective the first time; where positions are in host memory,
        in each forward.

        Args:
            positions: of this rank's part.

        Raises:
            Exception: what `read` raises here.
            Misuse: where it raises on another rank.
            RanksApart: on every rank, where they were given other sequences.
        """
        device = HOST if positions is None else positions.device
        is_due = self._is_due and compares_values(device, self._before)
        if torch.compiler.is_compiling() or self._skips or not is_due:
            return read()
        problem, found = None, list[T]()
        try:
            found.append(read())
        except TerrazzoError as error:
            problem = error
        told = self._ranks.told([self._noted.number, 0 if problem is None else dist.get_rank() + 1])
        words = self._noted.words
        vars(self._noted).clear()  # of this thread
        if problem is not None:
            raise problem
        if failed := max(rank for _, rank in told):
            raise Misuse(
                f"Rank {failed - 1}, with which this one shares sequences along cp, refuses what it was given: its own "
                "message has the edit."
            )
        if len({number for number, _ in told}) > 1:
            raise RanksApart(
                f"The ranks along cp were given other sequences (here {words}), and each has a part of the same"
                f" ones: give all of them the same batches, {DRAWN_BY_DATA_RANK}"
            )
        self._is_due, self._before = False, True
        return found[0]
