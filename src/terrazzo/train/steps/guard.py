"""Steps that are not like those before them: judged before their update, and on all ranks alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from torch import Tensor

from terrazzo.errors import Diverged
from terrazzo.train.session.session import Session

__all__ = ["FEWEST", "StepGuard", "spike_above"]

FEWEST = 8
"""Steps that there are before one is called a spike."""
NORMAL = 1.4826  # of a normal distribution, the standard deviation as a multiple of the median absolute one
LEAST = 0.01  # of the median: what is called a deviation at the least, where numbers hardly change


def spike_above(before: Sequence[float], deviations: float) -> float:
    """The value from which on a number is a spike, after those `before` it; infinite while they are too few.

    The median and the median absolute deviation, as of a normal distribution: one spike in the window moves neither.
    """
    if len(before) < FEWEST:
        return math.inf
    middle = statistics.median(before)
    spread = NORMAL * statistics.median(abs(value - middle) for value in before)
    return middle + deviations * max(spread, LEAST * abs(middle))


class StepGuard:
    """Judges each step by its loss and its gradients' norm over all ranks, and does as `guard.action` says.

    Both numbers are the same on every rank, and so is what is decided. The host waits for them, on CUDA too. A norm
    that is not finite, of a loss that is, is left to fp16's loss scaling where there is that.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._settings = session, session.config.guard
        self._scales = bool(session.optimizer.scaler_state())

    def objection(self, loss: Tensor, norm: Tensor) -> str | None:
        """What is wrong with a step whose gradients are there; None lets it be. Collective.

        Args:
            loss: this rank's share of it.
            norm: of the gradients over all ranks, before clipping.
        """
        if not self._settings.acts:
            return None
        judged = self._session.progress.judged
        both = (
            ("loss", float(self._session.share.total(loss.detach().clone())), judged.losses),
            ("gradients' norm", float(norm), judged.norms),
        )
        for what, value, before in both:
            if not math.isfinite(value):
                return None if self._scales and before is judged.norms else f"its {what} is {value}"
            if self._settings.spike is not None and value > (most := spike_above(before, self._settings.spike)):
                return f"its {what} is {value:.4g}, where more than {most:.4g} is a spike"
        for _, value, before in both:
            before.append(value)
            del before[: -self._settings.window]
        return None

    def act(self, why: str) -> str:
        """Do what is to be done about the step that is under way; what was done, in words. Collective.

        Raises:
            Diverged: where that is to end the run.
        """
        session, settings, progress = self._session, self._settings, self._session.progress
        session.optimizer.zero_grad()
        step = session.step + 1
        if settings.action == "stop":
            raise Diverged(
                f"Step {step} was not taken: {why}. Lower optimizer.lr, set train.clip, or let guard.action=skip or"
                f" rollback go on; checkpoints up to step {session.keeper.saved_step} are intact."
            )
        if len(progress.skipped) >= settings.limit:
            raise Diverged(
                f"Step {step} was not taken: {why}. That is one more than guard.limit {settings.limit} allows; before:"
                f" steps {', '.join(str(each['step']) for each in progress.skipped)}. Lower optimizer.lr, or raise it."
            )
        if settings.action == "skip":
            session.schedule.step()
            progress.step = step
            progress.skipped.append({"step": step, "batches": 1, "why": why})
            return f"step {step} not taken: {why}"
        return self._roll_back(step, why)

    def _roll_back(self, step: int, why: str) -> str:
        session = self._session
        session.keeper.wait()
        if not session.keeper.has_saved:
            raise Diverged(
                f"Step {step} was not taken: {why}, and there is no checkpoint to go back to. Set checkpoint.every, or"
                " guard.action=skip."
            )
        skipped = session.progress.skipped
        reached = session.loader.cursor  # beyond the step, where batches were left out before
        session.restore()
        batches = session.loader.skip_to(reached) + session.loader.skip(self._settings.skip_batches)
        session.progress.skipped = [*skipped, {"step": step, "batches": batches, "why": why}]
        return f"step {step} not taken, back to {session.step}, around {batches} batches: {why}"
