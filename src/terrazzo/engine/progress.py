"""How far the training of one model has come on this rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from terrazzo.engine.scaler import Denominator

__all__ = ["Progress"]


@dataclass
class Progress:
    """What changes from step to step and must be equal on all ranks, which `loop.pass_end` compares.

    Attributes:
        denominator: of finished gradient sums, as this rank was told; has the loss scaler, if there is one.
        steps: how often this rank's optimizers have stepped.
        hyper_parameters: those of each optimizer's last step as `optim.stock` reads them, by the number of its first
            param group. On every rank the same names, which are fixed when the optimizer is attached.
        dropped: a checksum of all gradients that have been left out of a step by setting `.grad` to None.
    """

    denominator: Denominator
    steps: int = 0
    hyper_parameters: dict[int, dict[str, float]] = field(default_factory=dict)
    dropped: int = 0

    def note_dropped(self, names: Iterable[str]) -> None:
        """The gradients of these parameters have been left out of a step."""
        self.dropped = zlib.crc32("\n".join(names).encode(), self.dropped)
