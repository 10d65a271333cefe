"""Connects a schedule to a model: what torch calls in forwards, in backwards, and what the engine asks of both."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.consensus.agreement import Agreement
from terrazzo.engine.consensus.row_exchanges import RowExchanges
from terrazzo.engine.hooks.backward_hooks import BackwardHooks, GradientListener
from terrazzo.engine.hooks.driven_parts import DrivenParts, OptimizerSteps
from terrazzo.engine.hooks.forward_hooks import ForwardHooks
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.progress.raised_passes import RaisedPasses
from terrazzo.engine.progress.training_progress import Progress
from terrazzo.engine.schedule.backward import BackwardPass
from terrazzo.engine.schedule.schedule import Schedule

__all__ = ["ModelHooks"]


class ModelHooks:
    """The hooks of one sharded model.

    Args:
        units: in registration order, root first.
        steps: of the model's optimizers.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        schedule: Schedule,
        sharding: ShardingSpec,
        progress: Progress,
        steps: OptimizerSteps,
    ) -> None:
        exchanges = RowExchanges(model, schedule, units[0].names)
        agreement = Agreement(model, units, schedule, sharding.axes, progress)
        driven = DrivenParts(units, schedule, sharding, progress.denominator, exchanges, agreement, steps)
        self._backward = BackwardHooks(driven)
        self._forward = ForwardHooks(model, driven, self._backward)

    @property
    def raised(self) -> RaisedPasses:
        """What is known of passes that raised."""
        return self._backward.raised

    def attach(self, model: nn.Module) -> None:
        """Register every hook on `model`, its modules and its trainable parameters."""
        self._forward.attach(model)
        self._backward.attach()

    def listen_to_gradients(self, listener: GradientListener) -> None:
        """Call `listener` at each backward, and before gradients are used, from now on."""
        self._backward.listener = listener

    def before_use(self) -> None:
        """Gradients are about to be clipped, or taken by the optimizer."""
        self._backward.listener.before_use()

    def refuse_forwards(self, why: str | None) -> None:
        """From now on, no forward may gather weights; None: it may again."""
        self._forward.refuse(why)

    def complete(self, backward: BackwardPass) -> None:
        """Sums of all gradients of a backward that autograd did not run have been started: end it. Collective."""
        self._backward.complete(backward)
