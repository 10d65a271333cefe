"""What is counted of one model on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from terrazzo.engine.instrumentation.phases import Phases
from terrazzo.engine.instrumentation.recorder import SILENT, Recorder
from terrazzo.engine.instrumentation.traffic import Ledger, Traffic

__all__ = ["Tally"]


@dataclass
class Tally:
    """The counts of one model, of a step that runs or of a dry run.

    Attributes:
        traffic: what this rank has sent.
        ledger: transient memory held.
        phases: where the training loop is.
        recorder: called with all of it as it happens.
    """

    traffic: Traffic = field(default_factory=Traffic)
    ledger: Ledger = field(default_factory=Ledger)
    phases: Phases = field(init=False)
    recorder: Recorder = field(default=SILENT, init=False, repr=False)

    def __post_init__(self) -> None:
        self.phases = Phases(self.traffic)

    def set_recorder(self, recorder: Recorder) -> None:
        """Report to `recorder` what is done from now on."""
        self.recorder = self.phases.recorder = recorder
        self.traffic.set_recorder(recorder)

    def reset(self) -> None:
        """Count from now on."""
        self.traffic.reset()
        self.ledger.reset()
