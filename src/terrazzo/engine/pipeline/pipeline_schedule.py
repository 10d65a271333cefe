"""The schedule of a model of which this rank has stages: several micro-batches of a step are in flight at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from terrazzo.engine.plan.moves import Divisor, GradientFate
from terrazzo.engine.schedule.backward import BackwardPass
from terrazzo.engine.schedule.program import Program
from terrazzo.engine.schedule.runnable import Runnable
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.engine.schedule.straying import Meet

__all__ = ["PipelineSchedule"]


class PipelineSchedule(Schedule):
    """Runs chunks of one model, each with a program of its own, in forwards and backwards that take turns.

    From a step's first forward to its last backward weights stay at the plan's `between`, so that a plan that keeps
    them there gathers once. Gradients add up on this rank and are summed over ranks at the end of the step: a sum that
    is waited for inside of a backward would have other stages wait, too.

    Args:
        chunks: the indices of the units of each; the others are as of `Schedule`.
    """

    def __init__(
        self,
        units: Sequence[Runnable],
        chunks: Sequence[Sequence[int]],
        prefetch: int,
        meet: Meet | None = None,
        divisor: Callable[[], Divisor] = Divisor,
    ) -> None:
        super().__init__(units, prefetch, meet, divisor)
        self._programs = [Program([units[index] for index in each]) for each in chunks]
        self.program = self._programs[0]

    @property
    def programs(self) -> Sequence[Program]:
        return self._programs

    def turn_to(self, chunk: int, ends_model: bool) -> None:
        """Note that a forward or backward of that chunk comes; `ends_model`: its output is the model's."""
        self.program, self.ends_model = self._programs[chunk], ends_model

    def begin_micro_batches(self) -> None:
        """Until `end_micro_batches`, forwards and backwards of several micro-batches take turns."""
        self.set_fate(GradientFate.LOCAL)
        self._weights.begin_micro_batches()

    def end_micro_batches(self) -> BackwardPass:
        """Every micro-batch has run: start summing what they have added up, as one backward, which has to be ended."""
        self.rest()
        self.set_fate(GradientFate.FINISHED)
        backward = self.begin_backward()
        for unit in self.units:  # nothing of another kind is under way: what stages share waits for other ranks
            unit.sum_tied()
        for unit in reversed(self.units):
            backward.close([unit])
            self._reductions.make_room()
        return backward
