"""How far the training of one model has come on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from terrazzo.engine.scaler import Denominator

__all__ = ["Progress"]


@dataclass
class Progress:
    """What changes from step to step and must be equal on all ranks, which `loop.pass_end` compares.

    Attributes:
        denominator: of finished gradient sums, as this rank was told; has the loss scaler, if there is one.
        steps: how often this rank's optimizers have stepped.
        rates: the learning rates of the last step, of each optimizer's param groups, by the number of its first one.
    """

    denominator: Denominator
    steps: int = 0
    rates: dict[int, list[float]] = field(default_factory=dict)
