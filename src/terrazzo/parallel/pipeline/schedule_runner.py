"""Runs one rank's actions of a pipeline's schedule, in one step, and meets the other ranks at the end.

A rank starts to receive an action's input while the action before runs, and waits for its own messages at the end. A
rank that fails goes through the rest of its actions without computing, so that no other waits for it. Others compute
with the zeros that it sends, and all ranks restore their buffers at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from terrazzo.engine import engine_of
from terrazzo.engine.autograd.asides import put_aside
from terrazzo.engine.buckets.parameters.outside_forward import OutsideForward
from terrazzo.errors import Misuse
from terrazzo.parallel.pipeline.buffer_snapshot import buffers_kept
from terrazzo.parallel.pipeline.deferred_weight_gradients import DeferredWeights
from terrazzo.parallel.pipeline.failures import PATIENCE_S, broke_a_connection
from terrazzo.parallel.pipeline.messages import Form, NothingSent, form_of
from terrazzo.parallel.pipeline.micro_batches import Auxiliary, LossFunction, MicroBatch, called, one_loss
from terrazzo.parallel.pipeline.pipeline_stages import PipelineStages
from terrazzo.parallel.pipeline.schedules import Action, ActionKind, forwards_of
from terrazzo.parallel.pipeline.stage_links import StageLinks, exchanges_inside

__all__ = ["ScheduleRunner"]


class _ForwardState(NamedTuple):
    """What is kept of a forward until its backward.

    Attributes:
        received: the input, from the stage before.
        grads: the gradient of the input, once backward has computed it.
        result: the output that was sent, or the loss.
        auxiliary: losses that modules have computed.
    """

    received: Tensor | None
    grads: list[Tensor]
    result: Tensor
    auxiliary: tuple[Tensor, ...]


class _Arrived(torch.autograd.Function):
    """The input that a stage received, as the beginning of its graph.

    It is no leaf of the graph: a stage's first module may change it in place, as it may in one process.

    Args:
        anchor: requires a gradient, and gets none.
        grads: the list to which the gradient of `values` is appended.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: Tensor, grads: list[Tensor]) -> Tensor:
        ctx.grads = grads
        ctx.mark_dirty(values)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.grads.append(grad)
        return None, None, None


class ScheduleRunner:
    """Runs the actions of one rank in one step."""

    def __init__(
        self,
        model: nn.Module,
        stages: PipelineStages,
        links: StageLinks,
        micro_batches: Sequence[MicroBatch],
        loss_fn: LossFunction,
        auxiliary: Auxiliary | None,
    ) -> None:
        self.model, self.engine, self.stages = model, engine_of(model), stages
        self.messages, self.failures = links
        step = self.engine.staged_step
        assert step is not None, "the model is in stages"
        self.step = step
        self.loss_fn, self.auxiliary = loss_fn, auxiliary
        self.micro_batches, self.trains = micro_batches, torch.is_grad_enabled()
        self.forms = [form_of(inputs, self.trains) for inputs, _ in micro_batches]
        self._outside = OutsideForward((each, _OF_ONE_STAGE) for each in model.parameters())
        self._forwards: dict[tuple[int, int], _ForwardState] = {}
        self._losses = torch.zeros((), device=self.engine.axes.device)
        self._deferred = DeferredWeights(self.step) if self.trains and stages.schedule == "zero_bubble" else None
        self._received_for: Action | None = None
        self._sent_for: Action | None = None
        self._returns = [0] * len(stages.bounds)
        self._patience_s: float | None = None

    def run(self) -> Tensor:
        """Run the step. Returns the sum of the losses, 0-d, fp32 or fp64, the same on all ranks along `pp`."""
        actions, axes = self._actions(), self.engine.axes
        self._patience_s = PATIENCE_S if self._meets_in_passes() else None
        under_way = self.step.under_way() if self.trains else nullcontext()
        with buffers_kept(self.model, self.stages, self.engine.tally.ledger), under_way:
            self._run_and_meet(actions)
        if self.trains:
            self.step.sum_gradients()
        return axes.total(self._losses.reshape(1), axes.stage_axis).reshape(())

    def _run_and_meet(self, actions: Sequence[Action]) -> None:
        """Run all actions and meet the other ranks."""
        try:
            with nullcontext() if self._deferred is None else self._deferred.by(self.model):
                problem = self._go_through(actions)
            self._meet(problem)
        except BaseException:
            self.messages.abandon()
            raise

    def _meets_in_passes(self) -> bool:
        """Whether ranks with the same stages wait for each other inside of forwards and backwards."""
        if not self.engine.axes.live(self.engine.axes.within_stage):
            return False
        return exchanges_inside(self.model, self.engine) or self.step.agrees_in_passes

    def _actions(self) -> Sequence[Action]:
        stages, count = self.stages, len(self.micro_batches)
        if self.trains:
            return stages.actions(count)
        return forwards_of(stages.ranks, len(stages.chunks), count)[stages.rank]

    def _go_through(self, actions: Sequence[Action]) -> Exception | None:
        """Run all actions. Returns the error of one that failed here, when no rank waits for this one any more.

        Raises:
            Exception: a connection has broken.
        """
        done = 0
        try:
            for action, following in itertools.zip_longest(actions, actions[1:]):
                self._start_receiving(action)
                values = self._receive(action)
                if following is not None:
                    self._start_receiving(following)
                self.step.turn_to(action.stage // self.stages.ranks, self.stages.is_last(action.stage))
                self._act(action, values)
                done += 1
            self.messages.finish()
        except NothingSent:
            self._finish_without_computing(actions[done:], None)
        except Exception as error:
            if broke_a_connection(error):
                raise
            left = actions[done:]  # none where messages have not been sent to their end
            self.failures.leave(error, left[0].stage if left else None)
            with suppress(RuntimeError, ConnectionError):  # others learn it then from broken connections
                self._finish_without_computing(left, self._patience_s)
            return error
        return None

    def _finish_without_computing(self, actions: Sequence[Action], patience_s: float | None) -> None:
        """Receive and send the messages of the actions that are left, without computing."""
        for action in actions:
            form = self.forms[action.micro_batch]
            if self._receives(action) and action != self._received_for:
                self.messages.pass_over(action, form, patience_s)
            if (successor := self._successor(action)) is not None and successor != self._sent_for:
                self.messages.send_nothing(successor, form)
        self.messages.finish(patience_s)

    def _meet(self, problem: Exception | None) -> None:
        """Meet all ranks at the end of the step, and take the dtype of the last stage's losses.

        Raises:
            Exception: `problem`, or the error of the first rank that has failed.
            Misuse: no micro-batch has sent a gradient back through one of the stages.
        """
        is_wide = self._losses.dtype == torch.float64
        *returns, any_wide = self.failures.meet([*self._returns, is_wide], problem, self._patience_s)
        if any_wide:
            self._losses = self._losses.double()  # all ranks add up one dtype
        if self.trains and (cut_off := [stage for stage, count in enumerate(returns) if stage and not count]):
            first, _ = self.stages.bounds[cut_off[0]]
            raise Misuse(
                f"No micro-batch of the step has sent a gradient back through stage {cut_off[0] + 1} of the pipeline, "
                f"which begins with {self.stages.line[first]!r}: the model detaches what goes into it, or does not use "
                "it there, and the stages before would be trained on zeros. In the place of that freeze what is in "
                "front with requires_grad_(False), and choose tz.Pipeline(split=[...]) whose first stage trains a "
                "module too. " + _REENTRANT
            )

    def _receive(self, action: Action) -> Tensor | None:
        if not self._receives(action):
            return None
        self._received_for = action
        return self.messages.take(action)

    def _send(self, successor: Action, values: Tensor, form: Form | None = None) -> None:
        self.messages.send(successor, values, form)
        self._sent_for = successor

    def _act(self, action: Action, values: Tensor | None) -> None:
        if self._deferred is not None:
            self._deferred.turn = action.stage, action.micro_batch
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(action, values)
            case ActionKind.BACKWARD:
                self._backward(action, values)
            case ActionKind.WEIGHT:
                assert self._deferred is not None
                self._deferred.compute(action.stage, action.micro_batch)

    # -- what an action does -----------------------------------------------------------------------------------

    def _forward(self, action: Action, received: Tensor | None) -> None:
        inputs, targets = self.micro_batches[action.micro_batch]
        grads: list[Tensor] = []
        if received is not None and self.trains:
            anchor = torch.empty(0, device=received.device, requires_grad=True)
            received = _Arrived.apply(anchor, received, grads)  # type: ignore[no-untyped-call]
        self.stages.enter(action.stage, received)
        try:
            result = called(self.model, inputs)
        finally:
            self.stages.leave()
        if (successor := self._successor(action)) is None:
            with self._outside.closed():
                result = one_loss(self.loss_fn(result, targets))
            self._losses = self._losses + result.detach()
        else:
            self._send(successor, result.detach(), self.forms[action.micro_batch])
            if self.trains and self.auxiliary is None and action.micro_batch == 0:
                self._check_nothing_is_left(action.stage)
        if self.trains:
            if not result.requires_grad:
                raise Misuse(
                    f"What stage {action.stage + 1} of the pipeline returns does not depend on a parameter that is "
                    "trained: no gradient would come back to it. Check that the model detaches nothing on its way. "
                    + _REENTRANT
                )
            self._forwards[action.stage, action.micro_batch] = _ForwardState(
                received, grads, result, self._auxiliary_losses(action.stage)
            )

    def _check_nothing_is_left(self, stage: int) -> None:
        """Refuse a loss that a module has left in an attribute, where no other stage sees it.

        Raises:
            Misuse: there.
        """
        begin, end = self.stages.bounds[stage]
        inside = [
            (path, module)
            for name in self.stages.line[begin:end]
            for path, module in self.model.get_submodule(name).named_modules(prefix=name)
        ]
        for path, module in inside:
            for left in put_aside([module]):
                if left.dim() == 0:
                    attribute = next(name for name, value in vars(module).items() if value is left)
                    raise Misuse(
                        f"'{path}.{attribute}' is a number with a gradient, which the module has left there in its "
                        f"forward, in stage {stage + 1} of the pipeline. Ranks of other stages do not see it: the "
                        "model's own forward would read there what was before. Give tz.step(auxiliary=...) "
                        "a function that returns such a loss of a module of the line, and leave it out of the model's "
                        "sum; or one that returns None, where nothing reads it."
                    )

    def _auxiliary_losses(self, stage: int) -> tuple[Tensor, ...]:
        """The losses to be trained on that modules of the stage have computed in the forward that has just ended."""
        if self.auxiliary is None:
            return ()
        begin, end = self.stages.bounds[stage]
        losses = (self.auxiliary(self.model.get_submodule(name)) for name in self.stages.line[begin:end])
        return tuple(each for each in losses if each is not None and each.requires_grad)

    def _backward(self, action: Action, grad: Tensor | None) -> None:
        received, grads, result, auxiliary = self._forwards.pop((action.stage, action.micro_batch))
        if grad is not None:
            self.step.gradient_received()
        torch.autograd.backward((result, *auxiliary), (grad, *(None for _ in auxiliary)))
        if received is not None and (successor := self._successor(action)) is not None:
            self._returns[action.stage] += bool(grads)
            self._send(successor, grads[0] if grads else torch.zeros_like(received))

    # -- what an action receives, and which action receives its result --------------------------------------

    def _receives(self, action: Action) -> bool:
        if action.kind is ActionKind.FORWARD:
            return action.stage > 0
        return action.kind is ActionKind.BACKWARD and not self.stages.is_last(action.stage)

    def _successor(self, action: Action) -> Action | None:
        """The action of another rank that receives what `action` sends; None where it sends nothing."""
        if action.kind is ActionKind.FORWARD and not self.stages.is_last(action.stage):
            return action._replace(stage=action.stage + 1)
        if action.kind is ActionKind.BACKWARD and action.stage > 0:
            return action._replace(stage=action.stage - 1)
        return None

    def _start_receiving(self, action: Action) -> None:
        """Start receiving the input of `action`: a gradient only once its forward has run."""
        if not self._receives(action):
            return
        if action.kind is ActionKind.FORWARD:
            self.messages.ask_for(action, self.forms[action.micro_batch])
        elif (state := self._forwards.get((action.stage, action.micro_batch))) is not None:
            self.messages.ask_for(action, state.result)


_REENTRANT = (
    "If it calls torch.utils.checkpoint, give that use_reentrant=False: else no gradient goes through what it runs, "
    "where a stage receives its input."
)
_OF_ONE_STAGE = (
    "loss_fn runs on the ranks of the last stage, whose parameters alone are here. Compute what is trained inside of "
    "the model's forward; a penalty on weights is exact as the optimizer's weight_decay, or by "
    "tz.step(auxiliary=...), which is called with the modules of every stage."
)
