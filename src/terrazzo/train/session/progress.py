"""How far a run has come, and what its next steps need to know of those before; it goes into checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["RunProgress"]


@dataclass
class Judged:
    """Losses and norms of the newest steps that the guard has let be, oldest first."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


@dataclass
class Validations:
    """The newest and the lowest validation `loss`, each with its `step`."""

    newest: dict[str, Any] | None = None
    best: dict[str, Any] | None = None

    def add(self, step: int, loss: float) -> None:
        self.newest = {"loss": loss, "step": step}
        if self.best is None or loss < self.best["loss"]:
            self.best = self.newest

    def of(self, step: int) -> float | None:
        """The loss of `step`, where that is the newest."""
        return None if self.newest is None or self.newest["step"] != step else self.newest["loss"]


@dataclass
class RunProgress:
    """How far a run has come.

    Attributes:
        step: finished optimizer steps.
        tokens: targets trained on.
        skipped: what the guard has left out: at which `step`, how many `batches`, and `why`.
        judged: what the guard compares steps with.
        cadence: what was found out of how often to save, as `Choice` has it.
    """

    step: int = 0
    tokens: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    judged: Judged = field(default_factory=Judged)
    cadence: dict[str, Any] | None = None
    validations: Validations = field(default_factory=Validations)

    def saved(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "judged": asdict(self.judged),
            "cadence": self.cadence,
            "metric": self.validations.of(self.step),
            "best": self.validations.best,
        }

    def take_up(self, extra: Mapping[str, Any], *, same_evaluation: bool) -> None:
        """Go on from what a checkpoint has; its best validation counts on the same validation data alone."""
        self.step, self.tokens = extra["step"], extra["tokens"]
        self.skipped = list(extra.get("skipped", ()))
        self.judged = Judged(**extra.get("judged", {}))
        self.cadence = extra.get("cadence") or self.cadence
        self.validations.best = extra["best"] if same_evaluation else None
