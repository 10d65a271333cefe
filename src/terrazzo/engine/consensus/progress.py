"""Progress of the training of one model on this rank."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from terrazzo.engine.autograd.loss_scale import LossScale
from terrazzo.engine.consensus.noted_numbers import NotedNumbers
from terrazzo.engine.plan.moves import Divisor
from terrazzo.errors import Misuse

__all__ = ["Denominator", "Progress"]


@dataclass
class Denominator:
    """Number that sums of gradients are divided by, once they are finished.

    Attributes:
        ranks: over which gradients are summed.
        chosen: by the user, in place of their number; None where that is meant.
        loss_scale: what gradients have been multiplied by on their way in: that of the optimizer's driver, if any.
    """

    ranks: int
    chosen: float | None = None
    loss_scale: LossScale = field(default_factory=LossScale)

    def choose(self, chosen: float | None, in_use: bool) -> None:
        """Set what the user chooses.

        Args:
            in_use: whether there are gradients that have been divided, and that no step has taken yet.

        Raises:
            Misuse: where these have been divided by another one.
        """
        if in_use and chosen != self.chosen:
            raise Misuse(
                f"The gradient denominator was set to {chosen!r} when gradients had been divided by {self.unscaled:g} "
                "already, in the last micro-batch's backward. Call set_gradient_denominator before that backward, or, "
                "for the next step, behind step() or zero_grad() of each optimizer whose parameters have gradients."
            )
        self.chosen = chosen

    @property
    def unscaled(self) -> float:
        """The part that the user chooses; the same on every rank."""
        return float(self.ranks if self.chosen is None else self.chosen)

    @property
    def is_mean(self) -> bool:
        """Whether it is the number of ranks alone: what each adds to its gradients is then added to their mean."""
        return self.chosen is None and not self.loss_scale.scales

    def numbers(self) -> dict[str, float]:
        """Numbers that ranks must have alike, by name."""
        scaling = {f"loss scaler's {name}": each for name, each in self.loss_scale.state().items()}
        return {"denominator": self.unscaled, **scaling}

    def divisor(self) -> Divisor:
        """Divisor of a sum that starts now."""
        return Divisor(self.unscaled, self.loss_scale.scale)


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
"""Bound of a checksum that is compared as an int64."""
