"""Progress of the training of one model on this rank."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from terrazzo.engine.progress.denominator import Denominator
from terrazzo.engine.progress.noted_numbers import NotedNumbers
from terrazzo.errors import Misuse

__all__ = ["Progress"]


@dataclass
class Progress:
    """Facts that change from step to step and must be equal on all ranks, which `consensus.pass_end` compares.

    Attributes:
        denominator: of finished gradient sums, as this rank was told; has the loss scale.
        steps: how often this rank's optimizers have stepped.
        hyper_parameters: those of each optimizer's last step, by the number of its first param group. On every rank
            the same names, which are fixed when the optimizer is attached.
        last_edit: the last of it, as a user writes it.
        abandoned: whether gradients were forgotten because a backward had raised, and nothing has been run since.
    """

    denominator: Denominator
    steps: int = 0
    hyper_parameters: dict[int, NotedNumbers] = field(default_factory=dict)
    last_edit: str = "none"
    abandoned: bool = False
    _forward_raised: bool = False
    _had_gradients: bool = False
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

    @property
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

    @property
    def failed(self) -> bool:
        """Whether a forward or backward has raised since gradients were last forgotten: there may be none here, where
        other ranks have some.
        """
        return self._forward_raised or self.abandoned

    def forward_raised(self, differentiated: bool) -> None:
        """Note that a forward has raised."""
        self._forward_raised |= differentiated

    def begin_backward(self, has_gradients: bool) -> None:
        """Note that a backward begins, where there are gradients of other micro-batches or not."""
        self._had_gradients = has_gradients

    def backward_raised(self) -> None:
        """Note that gradients were forgotten because a backward had raised."""
        self.abandoned = True

    def gradients_zeroed(self) -> None:
        """Note that the user has forgotten gradients, or set them to zero: the step can be run again."""
        self.abandoned = self._forward_raised = False

    def count_step(self) -> None:
        """Note that an optimizer has stepped."""
        self.steps += 1

    def begin_forward(self) -> None:
        """A differentiated forward begins: after a backward that raised, it is the same micro-batch again.

        Raises:
            Misuse: where gradients of earlier micro-batches went with that backward.
        """
        if self.abandoned and self._had_gradients:
            raise Misuse(
                "A forward came after a backward that raised, and that took what earlier micro-batches had left with "
                "it: optimizer.step() would use later ones alone. Call optimizer.zero_grad(), and run all "
                "micro-batches of the step again."
            )
        self.abandoned = False


_LIMIT = 1 << 62
"""Bound of a checksum that is compared as an int64."""
