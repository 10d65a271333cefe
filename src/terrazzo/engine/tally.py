"""What is counted of one model on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from terrazzo.engine.links.transfer import Ledger, Traffic

__all__ = ["Tally"]


@dataclass
class Tally:
    """The counts of one model.

    Attributes:
        traffic: what this rank has sent.
        ledger: transient memory held.
        steps: how often this rank's optimizers have stepped.
        rates: the learning rates of the last step, of each optimizer's param groups, by the number of its first one.

    Ranks whose steps or rates differ are refused: see `loop.pass_end`.
    """

    traffic: Traffic = field(default_factory=Traffic)
    ledger: Ledger = field(default_factory=Ledger)
    steps: int = 0
    rates: dict[int, list[float]] = field(default_factory=dict)
