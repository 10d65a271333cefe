"""One step of one rank of a pipeline: it goes through its list of actions, and meets the others at the end.

What the stage before sends is asked for while the action before still runs, and what is sent is waited for at the end.
A rank that fails goes through the rest without computing, so that no other waits for it. Others compute on what it
sends for values, and all put their buffers back at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from terrazzo.engine import Engine, PipelineSchedule, as_one, engine_of, parameter_names
from terrazzo.errors import BadInput, Misuse
from terrazzo.marks import SHARES_EXPERTS, SHARES_MATRICES, SHARES_SEQUENCES, Mark
from terrazzo.parallel.pipeline.buffer_snapshot import buffers_kept
from terrazzo.parallel.pipeline.deferred_weight_gradients import DeferredWeights
from terrazzo.parallel.pipeline.failures import PATIENCE_S, Failures, broke_a_connection
from terrazzo.parallel.pipeline.messages import Form, Messages, NothingSent, form_of
from terrazzo.parallel.pipeline.schedules import Action, ActionKind, forwards_of
from terrazzo.parallel.pipeline.stage_forward import ModelLine

__all__ = [
    "Auxiliary",
    "LossFunction",
    "MicroBatch",
    "PipelineStep",
    "Ways",
    "called",
    "exchanges_inside",
    "one_loss",
    "ways_of",
]

MicroBatch = tuple[Any, Any]
LossFunction = Callable[[Any, Any], Tensor]
Auxiliary = Callable[[nn.Module], Tensor | None]


def called(model: nn.Module, inputs: Any) -> Any:
    """What a model makes of a micro-batch's inputs."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def one_loss(loss: Any) -> Tensor:
    """A loss that a backward can begin at, and that losses add up to.

    Raises:
        BadInput: what is none.
    """
    if not isinstance(loss, Tensor) or loss.dim():
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise BadInput(
            f"loss_fn returned {given} to tz.step, which adds up the losses of micro-batches: have it return one "
            "number, a 0-d tensor, as loss.sum() is."
        )
    return loss


def exchanges_inside(model: nn.Module, engine: Engine) -> bool:
    """Whether forwards and backwards need other ranks: for weights that are split, or for what ranks share beside."""
    marks = SHARES_MATRICES, SHARES_SEQUENCES, SHARES_EXPERTS
    return engine.schedule.meet is not None or any(any(each.all_in(model)) for each in marks)


class Ways(NamedTuple):
    """How the ranks of a model's stages hear of each other, from step to step."""

    messages: Messages
    failures: Failures


def ways_of(model: nn.Module, engine: Engine, line: ModelLine) -> Ways:
    """Those of a model in stages. Collective the first time."""
    ways = _WAYS.find(model)
    if ways is None:
        axes = engine.axes
        along, stages = axes.along(axes.stages[0]), len(line.bounds)
        with as_one(model):
            holders = [line.holders(names) for names in parameter_names(model)]
        sharing = sorted({ranks for ranks in holders if len(ranks) > 1})
        messages = Messages(along, stages, axes.device, sharing)
        ways = _WAYS.leave(model, Ways(messages, Failures(axes, stages)))
    return ways


_WAYS = Mark[Ways]("terrazzo_ways")


class _Kept(NamedTuple):
    """Of a forward, until its backward.

    Attributes:
        received: from the stage before.
        grads: the gradient of that, when it has come.
        result: what was sent, or is the loss.
        aside: what modules have put aside.
    """

    received: Tensor | None
    grads: list[Tensor]
    result: Tensor
    aside: tuple[Tensor, ...]


class _Arrived(torch.autograd.Function):
    """What the stage before has sent, where the graph of this stage begins.

    As a leaf of the graph a stage's first module could not change it in place, which it may in one process.

    Args:
        anchor: requires a gradient, and gets none.
        grads: where that of `values` is put.
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


class PipelineStep:
    """One step of one rank."""

    def __init__(
        self,
        model: nn.Module,
        line: ModelLine,
        ways: Ways,
        micro_batches: Sequence[MicroBatch],
        loss_fn: LossFunction,
        auxiliary: Auxiliary | None,
    ) -> None:
        self.model, self.engine, self.line = model, engine_of(model), line
        self.messages, self.failures = ways
        self.loss_fn, self.auxiliary = loss_fn, auxiliary
        self.micro_batches, self.trains = micro_batches, torch.is_grad_enabled()
        self.forms = [form_of(inputs, self.trains) for inputs, _ in micro_batches]
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._losses = torch.zeros((), device=self.engine.axes.device)
        self._deferred = DeferredWeights(self.engine) if self.trains and line.schedule == "zero_bubble" else None
        self._received: Action | None = None
        self._answered: Action | None = None
        self._returns = [0] * len(line.bounds)
        self._patience_s: float | None = None

    def run(self) -> Tensor:
        """Returns the sum of the losses."""
        engine, schedule = self.engine, self.engine.schedule
        assert isinstance(schedule, PipelineSchedule)
        actions = self._actions()
        self._patience_s = PATIENCE_S if self._meets_in_passes(schedule) else None
        with buffers_kept(self.model, self.line, engine.tally.ledger):
            self._run_and_meet(actions, schedule)
        if self.trains:
            engine.hooks.end_step(schedule)
        return engine.axes.total(self._losses.reshape(1), engine.axes.stages).reshape(())

    def _run_and_meet(self, actions: Sequence[Action], schedule: PipelineSchedule) -> None:
        """All micro-batches; leaves no gradients where one of the ranks fails."""
        if self.trains:
            schedule.begin_step()
        try:
            with nullcontext() if self._deferred is None else self._deferred.by(self.model):
                problem = self._go_through(actions, schedule)
            self._meet(problem)
        except BaseException:
            self.messages.abandon()
            schedule.zero_grad()
            if self.trains:
                self.engine.progress.begin_backward(has_gradients=True)
                self.engine.progress.backward_raised()
            raise

    def _meets_in_passes(self, schedule: PipelineSchedule) -> bool:
        """Whether ranks with the same stages wait for each other inside of forwards and backwards."""
        if not self.engine.axes.live(self.engine.axes.every):
            return False
        return exchanges_inside(self.model, self.engine) or not all(each.order.agreed for each in schedule.programs)

    def _actions(self) -> Sequence[Action]:
        line, count = self.line, len(self.micro_batches)
        return line.actions(count) if self.trains else forwards_of(line.ranks, len(line.chunks), count)[line.rank]

    def _go_through(self, actions: Sequence[Action], schedule: PipelineSchedule) -> Exception | None:
        """Run all actions; returns what one of them has raised here, where others wait for this rank no more.

        Raises:
            Exception: of a connection that has broken.
        """
        done = 0
        try:
            for action, following in itertools.zip_longest(actions, actions[1:]):
                self._ask_for(action)
                values = self._take(action)
                if following is not None:
                    self._ask_for(following)
                schedule.turn_to(action.stage // self.line.ranks, self.line.is_last(action.stage))
                self._act(action, values)
                done += 1
            self.messages.finish()
        except NothingSent:
            self._stand_in(actions[done:], None)
        except Exception as error:
            if broke_a_connection(error):
                raise
            self.failures.leave(error, actions[done].stage)
            with suppress(RuntimeError, ConnectionError):  # they are not told then, and hear it from connections
                self._stand_in(actions[done:], self._patience_s)
            return error
        return None

    def _stand_in(self, actions: Sequence[Action], patience_s: float | None) -> None:
        """Take and send what is left, without computing."""
        for action in actions:
            form = self.forms[action.micro_batch]
            if self._receives(action) and action != self._received:
                self.messages.pass_over(action, form, patience_s)
            if (answer := self._answer_to(action)) is not None and answer != self._answered:
                self.messages.send_nothing(answer, form)
        self.messages.finish(patience_s)

    def _meet(self, problem: Exception | None) -> None:
        """All ranks have come to the end.

        Raises:
            Exception: what has been raised here, or on the first rank that has failed.
            Misuse: of a stage into which no micro-batch has sent a gradient back.
        """
        returns = self.failures.meet(self._returns, problem, self._patience_s)
        if self.trains and (cut_off := [stage for stage, count in enumerate(returns) if stage and not count]):
            first, _ = self.line.bounds[cut_off[0]]
            raise Misuse(
                f"No micro-batch of the step has sent a gradient back through stage {cut_off[0] + 1} of the pipeline, "
                f"which begins with {self.line.names[first]!r}: the model detaches what goes into it, or does not use "
                "it there, and the stages before would be trained on zeros. In the place of that freeze what is in "
                "front with requires_grad_(False), and choose tz.Pipeline(split=[...]) whose first stage trains a "
                "module too."
            )

    def _take(self, action: Action) -> Tensor | None:
        if not self._receives(action):
            return None
        self._received = action
        return self.messages.take(action)

    def _send(self, answer: Action, values: Tensor, form: Form | None = None) -> None:
        self.messages.send(answer, values, form)
        self._answered = answer

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
        self.line.enter(action.stage, received)
        try:
            result = called(self.model, inputs)
        finally:
            self.line.leave()
        if (answer := self._answer_to(action)) is None:
            result = one_loss(self.loss_fn(result, targets))
            self._losses += result.detach()
        else:
            self._send(answer, result.detach(), self.forms[action.micro_batch])
        if self.trains:
            if not result.requires_grad:
                raise Misuse(
                    f"What stage {action.stage + 1} of the pipeline returns does not depend on a parameter that is "
                    "trained: no gradient would come back to it. Check that the model detaches nothing on its way."
                )
            self._kept[action.stage, action.micro_batch] = _Kept(received, grads, result, self._aside(action.stage))

    def _aside(self, stage: int) -> tuple[Tensor, ...]:
        """What the stage's modules have put aside in the forward that has just ended."""
        if self.auxiliary is None:
            return ()
        begin, end = self.line.bounds[stage]
        found = (self.auxiliary(self.model.get_submodule(name)) for name in self.line.names[begin:end])
        return tuple(each for each in found if each is not None)

    def _backward(self, action: Action, grad: Tensor | None) -> None:
        received, grads, result, aside = self._kept.pop((action.stage, action.micro_batch))
        if grad is not None:
            self.engine.progress.denominator.loss_scale.gradient_has_it()  # it comes from the last stage
        torch.autograd.backward((result, *aside), (grad, *(None for _ in aside)))
        if received is not None and (answer := self._answer_to(action)) is not None:
            self._returns[action.stage] += bool(grads)
            self._send(answer, grads[0] if grads else torch.zeros_like(received))

    # -- what it begins with, and who waits for it -------------------------------------------------------------

    def _receives(self, action: Action) -> bool:
        if action.kind is ActionKind.FORWARD:
            return action.stage > 0
        return action.kind is ActionKind.BACKWARD and not self.line.is_last(action.stage)

    def _answer_to(self, action: Action) -> Action | None:
        """What begins with what this one sends; None where it sends nothing."""
        if action.kind is ActionKind.FORWARD and not self.line.is_last(action.stage):
            return action._replace(stage=action.stage + 1)
        if action.kind is ActionKind.BACKWARD and action.stage > 0:
            return action._replace(stage=action.stage - 1)
        return None

    def _ask_for(self, action: Action) -> None:
        """Start receiving it; a gradient once there is what it is the gradient of."""
        if not self._receives(action):
            return
        if action.kind is ActionKind.FORWARD:
            self.messages.ask_for(action, self.forms[action.micro_batch])
        elif (kept := self._kept.get((action.stage, action.micro_batch))) is not None:
            self.messages.ask_for(action, kept.result)
