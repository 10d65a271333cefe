"""The schedule of one model: it begins and ends passes, and keeps what lasts from one pass to the next.

Each forward is a `ForwardPass` and each backward a `BackwardPass`. They issue gathers, releases and reductions along a
program that all ranks share.

The program alone decides whether a unit is gathered at a position, and never what is in this rank's memory: only so do
all ranks issue the same collectives. `straying` handles units that come elsewhere than in the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from terrazzo.engine.labels.purposes import Purpose
from terrazzo.engine.plan.moves import Divisor, GradientFate
from terrazzo.engine.runtime.calls import do_nothing
from terrazzo.engine.schedule.backward import BackwardPass
from terrazzo.engine.schedule.forward import ForwardPass
from terrazzo.engine.schedule.gathered import BackwardToCome, GatheredWeights
from terrazzo.engine.schedule.order import Order
from terrazzo.engine.schedule.program import Program
from terrazzo.engine.schedule.reductions import Reductions
from terrazzo.engine.schedule.runnable import Runnable
from terrazzo.engine.schedule.straying import Meet, Straying

__all__ = ["Schedule"]


class Schedule:
    """Runs the units of one model, or units that only count bytes.

    Hooks begin and end passes, and tell the running pass which units torch comes to. All ranks begin and end the same
    passes; the units that they enter in between, and their order, may differ.

    Args:
        units: in registration order, root first.
        prefetch: how many units ahead of the running one are gathered.
        meet: gives the highest of the numbers that ranks bring to the end of a pass; None where weights are whole.
        divisor: returns what finished gradient sums are divided by.

    Attributes:
        program: what all ranks run.
        fate: what becomes of the gradients of backwards that begin from now on.
        ends_model: whether the forward returns the model's own output, and not the input of its next stage.
        forward: the model's forward that runs; None where the user calls a unit by itself.
        backward: the backward between `begin_backward` and `end_backward`; one that raised stays.
    """

    def __init__(
        self,
        units: Sequence[Runnable],
        prefetch: int,
        meet: Meet | None = None,
        divisor: Callable[[], Divisor] = Divisor,
    ) -> None:
        self.units, self.program, self.meet = units, Program(units), meet
        self.fate, self.ends_model = GradientFate.FINISHED, True
        self.forward: ForwardPass | None = None
        self.backward: BackwardPass | None = None
        self._forwards = self._backwards = 0
        self._weights, self._reductions = GatheredWeights(units, prefetch), Reductions(divisor)
        self._straying = Straying(self._weights, meet)

    @property
    def order(self) -> Order:
        return self.program.order

    @property
    def programs(self) -> Sequence[Program]:
        """Programs of all parts of the model that run by themselves: here one."""
        return [self.program]

    # -- what holds from now on --------------------------------------------------------------------------------

    def set_fate(self, fate: GradientFate) -> None:
        """Say what becomes of the gradients of backward passes from now on."""
        self.fate = fate

    @property
    def prefetch(self) -> int:
        """Number of units ahead of the running one that are gathered."""
        return self._weights.prefetch

    def gather_ahead(self, count: int) -> None:
        """Gather at least `count` units ahead of the running one from now on."""
        self._weights.gather_ahead(count)

    def on_finished(self, call: Callable[[int], None]) -> None:
        """Have `call` called with the index of each unit whose gradients are finished."""
        self._reductions.call_on(GradientFate.FINISHED, call)

    @contextlib.contextmanager
    def dropping(self, call: Callable[[int], None]) -> Iterator[None]:
        """Have no step use backwards inside: `call` gets each unit whose gradients are complete, to forget them."""
        before = self.fate
        self._reductions.call_on(GradientFate.DROPPED, call)
        self.set_fate(GradientFate.DROPPED)
        try:
            yield
        finally:
            self.set_fate(before)
            self._reductions.call_on(GradientFate.DROPPED, do_nothing)  # `call` may hold what holds this

    # -- forward -----------------------------------------------------------------------------------------------

    def begin_forward(self, training: bool) -> ForwardPass:
        """The model's own forward begins; `training`: it is differentiated, though parts of it may not be."""
        self._forwards += 1
        self.forward = ForwardPass(self.program, self._weights, self._straying, self._forwards, training)
        return self.forward

    def end_forward(self) -> None:
        """The model's own forward has ended: take part in what other ranks may still run."""
        ended = self.forward
        assert ended is not None, "no forward has begun"
        ended.end()
        self.forward = None
        self._weights.end_forward(ended.backward_follows)

    def abandon_forward(self) -> None:
        """The model's own forward raised."""
        self.forward = None
        self._weights.abandon_forward()

    @property
    def forward_number(self) -> int:
        """Number of the forward that runs or ran last, from 1; inside backward of the one that the backward is of."""
        return self._forwards if self.backward is None else self.backward.of_forward

    # -- backward ----------------------------------------------------------------------------------------------

    def begin_backward(self) -> BackwardPass:
        """A backward begins, here and on every rank."""
        if self.meet is not None or self.fate is not GradientFate.LOCAL:
            self._backwards += 1
        self.backward = BackwardPass(
            self.program, self._weights, self._straying, self._reductions, self._backwards, self.fate
        )
        return self.backward

    def end_backward(self) -> None:
        """Wait for all sums of the backward, which have been started."""
        self._reductions.wait()
        self.backward = None

    @property
    def awaits_backward(self) -> bool:
        """Whether the backward of an earlier forward has not come, or raised."""
        return self._weights.awaits_backward

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget every gradient, or set finished ones to zero; those on their way from a backward that raised, too."""
        if self.backward is not None or self._weights.step_in_flight:
            self._abandon_step()
        for unit in self.units:
            unit.zero_grad(set_to_none)

    def _abandon_step(self) -> None:
        """A backward raised, or another pass of a step in stages, on every rank: let go of what it has left."""
        if self.backward is not None:
            self.backward.abandon()
        self.backward = None
        self._weights.abandon_step()

    # -- units outside of passes -------------------------------------------------------------------------------

    def enter_alone(self, unit: Runnable) -> None:
        """Every rank calls a unit itself; returns once its weights may be read."""
        if not (self._weights.has(unit) and unit.weights.at_hand):
            self._gather_outside(unit)
        unit.weights.wait()

    def leave_alone(self, unit: Runnable, to_come: BackwardToCome) -> None:
        """A call of `enter_alone` has ended."""
        self._weights.expect_backward(unit, to_come)
        self._weights.reshard(unit, to_come is BackwardToCome.ANNOUNCED)

    def gather_early(self, unit: Runnable) -> None:
        """Every rank gathers a unit before the program comes to it."""
        self._weights.gather([unit.index], Purpose.OUTSIDE)

    def put_back(self, unit: Runnable) -> None:
        """Undo `gather_early`."""
        self._weights.put_back(unit)

    def gather_all(self) -> None:
        """Gather full weights of every unit; they stay until `rest`."""
        for unit in self.units:
            self._gather_outside(unit)
        for unit in self.units:
            unit.weights.wait()

    def rest(self) -> None:
        """Bring every unit back to the plan's `weight` place."""
        self._weights.rest()

    def _gather_outside(self, unit: Runnable) -> None:
        unit.weights.gather(self._weights.label(Purpose.OUTSIDE, unit.index), from_rest=True)
