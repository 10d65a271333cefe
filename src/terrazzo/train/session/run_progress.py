"""How far a run has come, and what its next steps need to know about earlier ones; it goes into checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, TypeVar

from terrazzo.errors import BadInput

__all__ = ["RunProgress", "read_saved"]


Saved = TypeVar("Saved")


def read_saved(kind: type[Saved], saved: Mapping[str, Any], name: str) -> Saved:
    """The values under `name` in a checkpoint's extra as a dataclass; raises `BadInput` if the fields differ."""
    known = {each.name: each.default is MISSING and each.default_factory is MISSING for each in fields(kind)}  # type: ignore[arg-type]
    strange = [f"has '{each}', which is not known here" for each in sorted(saved.keys() - known)]
    strange += [f"lacks '{each}'" for each, needed in known.items() if needed and each not in saved]
    if strange:
        raise BadInput(
            f"The checkpoint's extra['{name}'] {strange[0]}: another version of Terrazzo has written it. Go on with"
            " that version, or start anew with checkpoint.resume=never."
        )
    return kind(**saved)


@dataclass
class JudgedSteps:
    """Losses and gradients' norms of the newest steps that the guard has accepted, oldest first."""

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
        skipped: the steps that the guard has left out: `step`, how many `batches`, and `why`.
        judged: earlier steps, with which the guard compares new ones.
        cadence: the fields of a `SaveInterval` that was found; None before that.
        validations: the newest and the best validation loss.
    """

    step: int = 0
    tokens: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    judged: JudgedSteps = field(default_factory=JudgedSteps)
    cadence: dict[str, Any] | None = None
    validations: Validations = field(default_factory=Validations)

    def as_extra(self) -> dict[str, Any]:
        """The values that go into a checkpoint's extra."""
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
        """Continue from a checkpoint's extra. Its validations count only if those here are of the same sequences.

        Raises:
            BadInput: another version has written it, and this one cannot read it.
        """
        self.step, self.tokens = extra["step"], extra["tokens"]
        self.skipped = list(extra.get("skipped", ()))
        self.judged = read_saved(JudgedSteps, extra.get("judged", {}), "judged")
        self.cadence = extra.get("cadence") or self.cadence
        metric = extra.get("metric") if same_evaluation else None
        self.validations.newest = None if metric is None else {"loss": metric, "step": self.step}
        self.validations.best = extra["best"] if same_evaluation else None
