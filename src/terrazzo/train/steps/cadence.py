"""When a run saves, and how often if it is to find that out itself: `checkpoint.every: auto`.

The first saves come early, so that their cost can be measured: the time for which a save holds up training. A save in
the background costs only its copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from terrazzo.config import Config
from terrazzo.exchange import gather_json
from terrazzo.telemetry import Stopwatch
from terrazzo.train.session.run_progress import read_saved
from terrazzo.train.session.session import Session
from terrazzo.train.settings.intervals import is_due

__all__ = ["FIRST", "Cadence", "SaveInterval", "optimal_interval_s"]

FIRST = 5
"""Steps before each of the two measured saves. Two, since the first one includes what is done only once."""


def optimal_interval_s(cost_s: float, between_failures_s: float) -> float:
    """Seconds of training between saves with which a run that has failures ends earliest, in the mean.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
    Systems 22 (2006), 303-312, doi:10.1016/j.future.2004.11.016: with δ the seconds of a save and M those between
    failures, √(2δM) · (1 + √(δ/2M)/3 + (δ/2M)/9) - δ, and M where δ is 2M or more. The root alone is Young's (1974).
    """
    if cost_s >= 2 * between_failures_s:
        return between_failures_s
    part = cost_s / (2 * between_failures_s)
    return math.sqrt(2 * cost_s * between_failures_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


@dataclass(frozen=True)
class SaveInterval:
    """Steps between saves, and what they were computed from.

    Attributes:
        every: steps between saves.
        cost_s: seconds for which a save holds up the slowest rank.
        step_s: seconds of a step, without evaluations and samples.
        busy_s: seconds after which a save in the background was known to be done; 0 for other saves.
        ranks: of the run, each of which may fail.
        mtbf_hours, overhead, background: of the section `checkpoint`.
    """

    every: int
    cost_s: float
    step_s: float
    busy_s: float
    ranks: int
    mtbf_hours: float
    overhead: float
    background: bool

    @classmethod
    def of(cls, config: Config, ranks: int, *, cost_s: float, step_s: float, busy_s: float) -> SaveInterval:
        """Daly's interval, but not shorter than `checkpoint.overhead` allows, nor than a save takes."""
        settings = config.checkpoint
        best_s = optimal_interval_s(cost_s, settings.mtbf_hours * 3600 / ranks)
        allowed_s = cost_s * (1 / settings.overhead - 1)
        every = max(1, math.ceil(max(best_s, allowed_s, busy_s) / step_s))
        assumptions = settings.mtbf_hours, settings.overhead, settings.background
        return cls(every, cost_s, step_s, busy_s, ranks, *assumptions)

    def holds_for(self, config: Config, ranks: int) -> bool:
        """Whether the interval is still valid for this configuration and number of ranks."""
        settings = config.checkpoint
        now = ranks, settings.mtbf_hours, settings.overhead, settings.background
        return now == (self.ranks, self.mtbf_hours, self.overhead, self.background)

    def __str__(self) -> str:
        who = f"one of {self.ranks} ranks fails" if self.ranks > 1 else "a rank fails"
        return (
            f"checkpoint.every auto: {self.every:,}. A save takes {self.cost_s:.3g} s, a step {self.step_s:.3g} s, and"
            f" {who} every {self.mtbf_hours / self.ranks:,.0f} h"
        )


class Cadence:
    """When a session saves: every `checkpoint.every` steps, or at the interval that it finds (`auto`)."""

    def __init__(self, session: Session) -> None:
        self._session, self._every = session, session.config.checkpoint.every
        self._plan = session.config.plan
        self.begin()

    def begin(self) -> None:
        """Start measuring, unless the interval is known."""
        self._first = self._session.step
        self._saved_step: int | None = None  # of the first save that is measured
        self._since_save = Stopwatch()
        self._busy_s = self._step_s = self._cost_s = 0.0
        self.choice = self._choice_before() if self._every == "auto" else None  # what was found out, here or before

    def _choice_before(self) -> SaveInterval | None:
        """The interval that was found before the run was resumed, if it is still valid."""
        session = self._session
        saved = session.progress.cadence
        choice = None if saved is None else read_saved(SaveInterval, saved, "cadence")
        return choice if choice is not None and choice.holds_for(session.config, session.ranks.world_size) else None

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after a step."""
        if self._every is None:
            return False
        if isinstance(self._every, int):
            return is_due(self._plan, step, self._every)
        if (choice := self.choice) is not None:
            return is_due(self._plan, step, choice.every)
        return is_due(self._plan, step - self._first, FIRST)

    def apart(self) -> AbstractContextManager[None]:
        """A context for what does not count as part of a step."""
        return self._since_save.pause()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context for a save; call `choose` after it. Collective."""
        measures = self._every == "auto" and self.choice is None
        if measures and self._saved_step is not None:
            self._step_s = self._since_save.total_s / (self._session.step - self._saved_step)
            self._session.checkpoints.wait()  # the one before, in the background, is not to hold this one up
            self._busy_s = self._since_save.elapsed_s if self._session.config.checkpoint.background else 0.0
        save = Stopwatch()
        yield
        self._cost_s = save.total_s
        if measures and self._saved_step is None:
            self._saved_step = self._session.step
            self._since_save.reset()

    def choose(self) -> SaveInterval | None:
        """The interval, after the second measured save; None after any other. Collective."""
        session = self._session
        if self._every != "auto" or self.choice is not None or not self._step_s:
            return None
        of_ranks: list[dict[str, Any]] = gather_json(
            {"cost_s": self._cost_s, "step_s": self._step_s, "busy_s": self._busy_s}
        )
        slowest = {name: max(each[name] for each in of_ranks) for name in of_ranks[0]}
        self.choice = choice = SaveInterval.of(session.config, session.ranks.world_size, **slowest)
        session.progress.cadence = asdict(choice)
        return choice
