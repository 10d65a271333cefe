"""Connects a schedule to a model: what torch calls in forwards, in backwards, and what the engine asks of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from terrazzo.engine.accord.agreement import Agreement
from terrazzo.engine.accord.progress import Progress
from terrazzo.engine.accord.row_exchanges import RowExchanges
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.loop.backward_hooks import BackwardHooks
from terrazzo.engine.loop.forward_hooks import ForwardHooks
from terrazzo.engine.plan.sharding import ShardingSpec
from terrazzo.engine.runtime.calls import do_nothing
from terrazzo.engine.schedule.schedule import Schedule
from terrazzo.engine.schedule.stages import StagedSchedule

__all__ = ["Hooks"]


class Hooks:
    """The hooks of one sharded model.

    Args:
        units: in registration order, root first.

    Attributes:
        before_use: to be called before gradients are clipped, or taken by the optimizer.
    """

    def __init__(self, units: Sequence[Unit], schedule: Schedule, sharding: ShardingSpec, progress: Progress) -> None:
        self._names, self._exchanges = units[0].names, RowExchanges(schedule)
        agreement = Agreement(units, schedule, sharding.axes, progress)
        self._backward = BackwardHooks(units, schedule, sharding, progress, self._exchanges, agreement)
        self._forward = ForwardHooks(units, schedule, sharding, progress, self._exchanges, self._backward)
        self.before_use: Callable[[], None] = do_nothing

    def attach(self, model: nn.Module) -> None:
        """Register every hook on `model`, its modules and its trainable parameters."""
        self._exchanges.find(model, self._names)
        self._forward.attach(model)
        self._backward.attach()

    def tell_of_gradients(
        self, *, begun: Callable[[], None], ended: Callable[[], None], before_use: Callable[[], None]
    ) -> None:
        """Call these from now on.

        Args:
            begun, ended: for each backward pass, before any gradient is there and when all are.
            before_use: before gradients are clipped, or taken by the optimizer.
        """
        self._backward.tell_of_gradients(begun, ended)
        self.before_use = before_use

    def recover_with(self, recover: Callable[[], None]) -> None:
        """Call this before a forward or a backward uses weights: it ends steps that have raised."""
        self._backward.recover = recover

    def refuse_forwards(self, why: str | None) -> None:
        """From now on, no forward may gather weights; None: it may again."""
        self._forward.refuse(why)

    def end_step(self, schedule: StagedSchedule) -> None:
        """Every micro-batch of a step in stages has run: finish what they have added up. Collective."""
        self._backward.finish(schedule.end_step())
