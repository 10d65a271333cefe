"""How far the training of one model has come on this rank."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from terrazzo.engine.loop.scaler import Denominator
from terrazzo.errors import Misuse

__all__ = ["Progress"]


@dataclass
class Progress:
    """What changes from step to step and must be equal on all ranks, which `loop.pass_end` compares.

    Attributes:
        denominator: of finished gradient sums, as this rank was told; has the loss scaler, if there is one.
        steps: how often this rank's optimizers have stepped.
        hyper_parameters: those of each optimizer's last step as `optim.stock` reads them, by the number of its first
            param group. On every rank the same names, which are fixed when the optimizer is attached.
        edits: a checksum of all that the loop has done to gradients: forgotten, zeroed, scaled, clipped.
        last_edit: the last of it, as a user writes it.
        abandoned: whether gradients were forgotten because a backward had raised, and nothing has been run since.
    """

    denominator: Denominator
    steps: int = 0
    hyper_parameters: dict[int, dict[str, float]] = field(default_factory=dict)
    edits: int = 0
    last_edit: str = "none"
    abandoned: bool = False
    _forward_raised: bool = False
    _had_gradients: bool = False

    def note(self, edit: str) -> None:
        """Gradients are edited, before the same step on every rank; in any order, for a loop may go through a set."""
        self.edits = (self.edits + zlib.crc32(f"{self.steps} {edit}".encode())) % _LIMIT
        self.last_edit = edit

    @property
    def failed(self) -> bool:
        """Whether a forward or backward has raised since gradients were last forgotten: there may be none here, where
        other ranks have some.
        """
        return self._forward_raised or self.abandoned

    def forward_raised(self, differentiated: bool) -> None:
        self._forward_raised |= differentiated

    def begin_backward(self, has_gradients: bool) -> None:
        """A backward begins, where there are gradients of other micro-batches or not."""
        self._had_gradients = has_gradients

    def backward_raised(self) -> None:
        """Gradients were forgotten because a backward had raised."""
        self.abandoned = True

    def forget_gradients(self) -> None:
        """The user has forgotten them, or set them to zero: the step can be run again."""
        self.abandoned = self._forward_raised = self.denominator.used = False

    def end_step(self) -> None:
        """An optimizer has stepped."""
        self.steps += 1
        self.denominator.used = False

    def begin_forward(self) -> None:
        """A differentiated forward begins: behind a backward that raised, it is the same micro-batch again.

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
"""Of a checksum that is compared as an int64."""
