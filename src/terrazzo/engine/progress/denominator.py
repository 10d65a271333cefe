"""What sums of gradients are divided by: the number of ranks or what the user has chosen, and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from terrazzo.engine.plan.moves import Divisor
from terrazzo.engine.progress.loss_scale import LossScale
from terrazzo.engine.progress.scaled_passes import Passes, ScaledPasses
from terrazzo.errors import Misuse

__all__ = ["Denominator"]


@dataclass
class Denominator:
    """Number that sums of gradients are divided by, once they are finished.

    Attributes:
        ranks: over which gradients are summed.
        chosen: by the user, in place of their number; None where that is meant.
        loss_scale: what gradients have been multiplied by on their way in: that of the optimizer's driver, if any.
        passes: what multiplies them.
    """

    ranks: int
    chosen: float | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    passes: Passes = field(default_factory=Passes)

    def scale_by(self, loss_scale: LossScale) -> None:
        """Have passes multiply gradients by another loss scale from now on, and divide it out."""
        self.loss_scale, self.passes = loss_scale, ScaledPasses(loss_scale) if loss_scale.scales else Passes()

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
                "for the next step, after step() or zero_grad() of each optimizer whose parameters have gradients."
            )
        self.chosen = chosen

    @contextmanager
    def kept_if_refused(self) -> Iterator[None]:
        """What is chosen inside holds only if nothing is raised there."""
        chosen = self.chosen
        try:
            yield
        except BaseException:
            self.chosen = chosen
            raise

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
