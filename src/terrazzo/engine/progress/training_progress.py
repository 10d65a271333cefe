"""How far the training of one model has come on this rank: what ranks must have alike."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from terrazzo.engine.progress.denominator import Denominator
from terrazzo.engine.progress.noted_numbers import NotedNumbers

__all__ = ["Progress"]


@dataclass
class Progress:
    """Facts that change from step to step and must be equal on all ranks, which `consensus.pass_end` compares.

    Attributes:
        denominator: of finished gradient sums, as this rank was told; has the loss scale.
        steps: how often this rank's optimizers have stepped.
        hyper_parameters: those of each optimizer's last step, by the number of its first param group. On every rank
            the same names, which are fixed when the optimizer is attached.
        last_edit: what was done to gradients last, as a user writes it.
    """

    denominator: Denominator
    steps: int = 0
    hyper_parameters: dict[int, NotedNumbers] = field(default_factory=dict)
    last_edit: str = "none"
    _edits: int = 0
    _on_their_way: list[tuple[str, NotedNumbers]] = field(default_factory=list)

    def note(self, edit: str, numbers: NotedNumbers | None = None) -> None:
        """Note that gradients are edited, before the same step on every rank.

        Edits may come in any order, for a loop may go through a set.

        Args:
            edit: as a user writes it.
            numbers: that it was done with, where `edit` does not have them.
        """
        self.last_edit, text = edit, f"{self.steps} {edit}"
        if numbers is None:
            self._add_edit(text)
        else:
            self._on_their_way.append((text, numbers))

    def edits(self) -> int:
        """A checksum of all that the loop has done to gradients: forgotten, zeroed, scaled, clipped.

        The host waits for numbers that are on a device.
        """
        for text, numbers in self._on_their_way:
            self._add_edit(f"{text} {numbers.values()}")
        self._on_their_way.clear()
        return self._edits

    def _add_edit(self, text: str) -> None:
        self._edits = (self._edits + zlib.crc32(text.encode())) % _LIMIT

    def count_step(self) -> None:
        """Note that an optimizer has stepped."""
        self.steps += 1


_LIMIT = 1 << 62
"""Bound of a checksum that is compared as an int64."""
