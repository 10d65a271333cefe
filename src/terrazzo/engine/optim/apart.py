"""What the driver of an optimizer asks of updates away from the device, however and when they are made."""

from __future__ import annotations

from typing import Protocol

from torch.optim import Optimizer

__all__ = ["Apart"]


class Apart(Protocol):
    """Updates of one model's units: `Background`, where any of its states rest elsewhere than on the device."""

    @property
    def in_backward(self) -> bool:
        """Whether units are updated while backward runs."""

    def unit_reduced(self, index: int, optimizer: Optimizer) -> None:
        """The gradients of a unit are finished."""

    def begin(self, optimizer: Optimizer) -> None:
        """`optimizer.step()`: start the updates that are not under way."""

    def end_step(self) -> None:
        """`optimizer.step()` returns."""

    def forget(self, abandoned: bool = False) -> None:
        """Gradients are forgotten; `abandoned`: because a backward raised."""

    def mend(self) -> None:
        """All states have been restored."""

    def finish_updates(self) -> None:
        """Wait for every update, and bring all weights at rest in line."""

    def prepare_clipping(self, max_norm: float) -> None:
        """No update reads or scales gradients from now on. Raises: `Misuse` where they have been used already."""
