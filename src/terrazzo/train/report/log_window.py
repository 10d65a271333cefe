"""What is measured of the steps between two rows of the log."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from terrazzo.engine import engine_of
from terrazzo.telemetry import PeakMemory, Stopwatch
from terrazzo.train.model.expert_load import ExpertLoad
from terrazzo.train.report.step_metrics import StepsMeasured
from terrazzo.train.session.session import Session

__all__ = ["LogWindow"]


class LogWindow:
    """The steps of a session since the last row of the log, or since `begin`, as this rank has measured them."""

    def __init__(self, session: Session) -> None:
        self._session, self._traffic = session, engine_of(session.model).traffic
        self._watch, self._memory = Stopwatch(), PeakMemory(session.ranks.device)
        self._learning_rate = 0.0
        self._load: Mapping[str, ExpertLoad] = {}
        self.begin()

    def begin(self) -> None:
        """Measure from now on."""
        self._step, self._tokens, self._wait_s = self._session.step, self._session.progress.tokens, 0.0
        self._watch.reset()

    def reading(self) -> AbstractContextManager[None]:
        """Data are waited for inside."""
        return self._watch.measure()

    def apart(self) -> AbstractContextManager[None]:
        """What is inside is no part of a step."""
        return self._watch.pause()

    def step_taken(self, learning_rate: float, load: Mapping[str, ExpertLoad]) -> None:
        """A step was taken with that rate.

        Args:
            load: of the experts in it, by router.
        """
        self._learning_rate, self._load = learning_rate, load

    def step_ended(self) -> None:
        """A step has ended, the ranks' agreement on what comes next included."""
        self._wait_s += self._traffic.total_wait_s + self._traffic.control_wait_s

    def is_due(self, newest: int | None, *, last: bool) -> bool:
        """Whether a row is due: behind every log step, and behind the next one that is taken where one was left out.

        Args:
            newest: the newest step that was taken, and not left out.
            last: the run ends with this step: the row is of `newest`.
        """
        every, step = self._session.config.log.every, self._session.step
        if newest is None or newest <= self._step:
            return False
        return last or (newest == step and step // every > self._step // every)

    def measured(self, step: int, loss: float, grad_norm: float) -> StepsMeasured:
        """The row of `step`, with its loss and gradients' norm; `begin` follows."""
        return StepsMeasured(
            step=step,
            loss=loss,
            learning_rate=self._learning_rate,
            grad_norm=grad_norm,
            steps=self._session.step - self._step,  # a save in between has emptied the losses
            tokens=self._session.progress.tokens - self._tokens,
            total_s=self._watch.total_s,
            data_wait_s=self._watch.measured_s,
            communication_s=self._wait_s,
            peak_memory_bytes=self._memory.peak_bytes,
            load=self._load,
        )
