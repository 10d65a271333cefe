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
        steps: how often this rank's optimizers have stepped; ranks that differ are refused.
    """

    traffic: Traffic = field(default_factory=Traffic)
    ledger: Ledger = field(default_factory=Ledger)
    steps: int = 0
