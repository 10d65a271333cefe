"""`tz.step`: all micro-batches of a step, also of a model of which ranks have stages.

Each rank goes through its own list of actions. What the stage before sends is asked for while the action before still
runs, and what is sent is waited for at the end. Only then are gradients summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from terrazzo.engine import Engine, StagedSchedule, accumulate, as_one, engine_of, parameter_names, stages_of
from terrazzo.engine.plan.marks import Mark
from terrazzo.errors import BadInput, Misuse
from terrazzo.parallel.pipeline.agreement import Given, begin_alike
from terrazzo.parallel.pipeline.deferred import DeferredWeights
from terrazzo.parallel.pipeline.line import Line
from terrazzo.parallel.pipeline.messages import Messages, form_of
from terrazzo.parallel.pipeline.order import Action, Kind, forwards_of

__all__ = ["step"]

MicroBatch = tuple[Any, Any]
LossFunction = Callable[[Any, Any], Tensor]
Auxiliary = Callable[[nn.Module], Tensor | None]


def step(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss_fn: LossFunction,
    *,
    denominator: float | None = None,
    auxiliary: Auxiliary | None = None,
) -> Tensor:
    """Forward and backward of all micro-batches of a step; clipping and `optimizer.step()` come behind. Collective.

    Without an axis `pp` this is the loop with `tz.accumulate` that it replaces. With one, a rank runs its stages, in
    the order of the pipeline's schedule, and gradients are summed over data ranks when all micro-batches have run.

    Args:
        micro_batches: pairs of the model's inputs and of what the loss compares outputs with. Inputs are one value, a
            tuple of several, or a dict of keyword arguments. Ranks along `pp` are given the same inputs, and those of
            the last stage the targets that belong to them.
        loss_fn: called with outputs and targets, on the ranks of the last stage; the losses of micro-batches add up.
        denominator: as for `model.set_gradient_denominator`, from now on; None leaves it as it is.
        auxiliary: called after each forward with the model, or in a pipeline with each module of the line that has
            run: what modules inside it have put aside to be trained on, as a sum like the loss; None for nothing.

    Returns:
        The sum of the losses of `loss_fn`, 0-d, detached and the same on all ranks along `pp`. Without gradients
        enabled, nothing else is done.

    Raises:
        BadInput: no micro-batch, other things than pairs, or too few for the pipeline; a loss that is not 0-d.
        RanksApart: before any work, on every rank along `pp`, where these were given other numbers of micro-batches,
            inputs of other forms or with other values, or the like; or where one of them raises. Values are compared
            in each step on CPUs, and on other devices, for which the host would have to wait, in a model's first one.
    """
    engine, line = engine_of(model), stages_of(model)

    def given() -> Given:
        _check(micro_batches)
        if denominator is not None:
            model.set_gradient_denominator(denominator)  # type: ignore[operator]
        used = engine.progress.denominator.unscaled
        inputs = [dict(each) if isinstance(each, Mapping) else each for each, _ in micro_batches]
        return Given(inputs, used, auxiliary is not None)

    if isinstance(line, Line):
        messages = messages_of(model, engine, line)
        told = begin_alike(engine.axes, messages, given)
        pairs = [(inputs, targets) for inputs, (_, targets) in zip(told.inputs, micro_batches, strict=True)]
        return _StepRun(model, messages, pairs, loss_fn, auxiliary).run()
    given()
    total = torch.zeros((), device=engine.axes.device)
    for number, (inputs, targets) in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        with nullcontext() if last or not torch.is_grad_enabled() else accumulate(model):
            loss = _one(loss_fn(_called(model, inputs), targets))
            if torch.is_grad_enabled():
                aside = None if auxiliary is None else auxiliary(model)
                (loss if aside is None else loss + aside).backward()
        total += loss.detach()
    return total


def _check(micro_batches: Sequence[MicroBatch]) -> None:
    if not isinstance(micro_batches, Sequence) or not micro_batches:
        raise BadInput(f"tz.step was given {micro_batches!r} for micro-batches: give a list of (inputs, targets).")
    for each in micro_batches:
        if not isinstance(each, tuple | list) or len(each) != 2:
            raise BadInput(
                f"tz.step was given a {type(each).__name__} for a micro-batch: give pairs of the model's inputs and of "
                "what loss_fn(outputs, targets) compares them with."
            )


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _one(loss: Any) -> Tensor:
    """A loss that a backward can begin at, and that losses add up to."""
    if not isinstance(loss, Tensor) or loss.dim():
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise BadInput(
            f"loss_fn returned {given} to tz.step, which adds up the losses of micro-batches: have it return one "
            "number, a 0-d tensor, as loss.sum() is."
        )
    return loss


class _Kept(NamedTuple):
    """Of a forward, until its backward.

    Attributes:
        received: from the stage before.
        result: what was sent, or is the loss.
        aside: what modules have put aside.
    """

    received: Tensor | None
    result: Tensor
    aside: tuple[Tensor, ...]


class _StepRun:
    """One step of one rank of a pipeline."""

    def __init__(
        self,
        model: nn.Module,
        messages: Messages,
        micro_batches: Sequence[MicroBatch],
        loss_fn: LossFunction,
        auxiliary: Auxiliary | None,
    ) -> None:
        line = stages_of(model)
        assert isinstance(line, Line)
        self.model, self.engine, self.line, self.messages = model, engine_of(model), line, messages
        self.loss_fn, self.auxiliary = loss_fn, auxiliary
        self.micro_batches, self.trains = micro_batches, torch.is_grad_enabled()
        self.forms = [form_of(inputs, self.trains) for inputs, _ in micro_batches]
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._losses = torch.zeros((), device=self.engine.axes.device)
        self._deferred = DeferredWeights(self.engine) if self.trains and line.schedule == "zero_bubble" else None

    def run(self) -> Tensor:
        """Returns the sum of the losses."""
        engine, schedule = self.engine, self.engine.schedule
        assert isinstance(schedule, StagedSchedule)
        actions = self._actions()
        if self.trains:
            schedule.begin_step()
        try:
            with nullcontext() if self._deferred is None else self._deferred.by(self.model):
                for action, following in zip(actions, [*actions[1:], None], strict=True):
                    self._ask_for(action)
                    values = self.messages.take(action) if self._receives(action) else None
                    if following is not None:
                        self._ask_for(following)
                    schedule.turn_to(action.stage // self.line.ranks, self.line.is_last(action.stage))
                    self._act(action, values)
            self.messages.finish()
        except BaseException:
            self.messages.abandon()
            schedule.zero_grad()
            if self.trains:
                engine.progress.begin_backward(has_gradients=True)
                engine.progress.backward_raised()
            raise
        if self.trains:
            engine.hooks.end_step(schedule)
        return engine.axes.total(self._losses.reshape(1), engine.axes.stages).reshape(())

    def _actions(self) -> Sequence[Action]:
        line, count = self.line, len(self.micro_batches)
        return line.actions(count) if self.trains else forwards_of(line.ranks, len(line.chunks), count)[line.rank]

    def _act(self, action: Action, values: Tensor | None) -> None:
        if self._deferred is not None:
            self._deferred.turn = action.stage, action.micro_batch
        match action.kind:
            case Kind.FORWARD:
                self._forward(action, values)
            case Kind.BACKWARD:
                self._backward(action, values)
            case Kind.WEIGHT:
                assert self._deferred is not None
                self._deferred.compute(action.stage, action.micro_batch)

    # -- what an action does -----------------------------------------------------------------------------------

    def _forward(self, action: Action, received: Tensor | None) -> None:
        inputs, targets = self.micro_batches[action.micro_batch]
        if received is not None and self.trains:
            received.requires_grad_()
        self.line.enter(action.stage, received)
        try:
            result = _called(self.model, inputs)
        finally:
            self.line.leave()
        if self.line.is_last(action.stage):
            result = _one(self.loss_fn(result, targets))
            self._losses += result.detach()
        else:
            following = action._replace(stage=action.stage + 1)
            self.messages.send(following, result.detach(), self.forms[action.micro_batch])
        if self.trains:
            if not result.requires_grad:
                raise Misuse(
                    f"What stage {action.stage + 1} of the pipeline returns does not depend on a parameter that is "
                    "trained: no gradient would come back to it. Check that the model detaches nothing on its way."
                )
            self._kept[action.stage, action.micro_batch] = _Kept(received, result, self._aside(action.stage))

    def _aside(self, stage: int) -> tuple[Tensor, ...]:
        """What the stage's modules have put aside in the forward that has just ended."""
        if self.auxiliary is None:
            return ()
        begin, end = self.line.bounds[stage]
        found = (self.auxiliary(self.model.get_submodule(name)) for name in self.line.names[begin:end])
        return tuple(each for each in found if each is not None)

    def _backward(self, action: Action, grad: Tensor | None) -> None:
        received, result, aside = self._kept.pop((action.stage, action.micro_batch))
        if grad is not None:
            self.engine.progress.denominator.loss_scale.gradient_has_it()  # it comes from the last stage
        torch.autograd.backward((result, *aside), (grad, *(None for _ in aside)))
        if received is not None:
            self.messages.send(action._replace(stage=action.stage - 1), _gradient_of(received))

    # -- what it begins with -----------------------------------------------------------------------------------

    def _receives(self, action: Action) -> bool:
        if action.kind is Kind.FORWARD:
            return action.stage > 0
        return action.kind is Kind.BACKWARD and not self.line.is_last(action.stage)

    def _ask_for(self, action: Action) -> None:
        """Start receiving it; a gradient once there is what it is the gradient of."""
        if not self._receives(action):
            return
        if action.kind is Kind.FORWARD:
            self.messages.ask_for(action, self.forms[action.micro_batch])
        elif (kept := self._kept.get((action.stage, action.micro_batch))) is not None:
            self.messages.ask_for(action, kept.result)


def _gradient_of(received: Tensor) -> Tensor:
    """Zeros where the stage has not used it."""
    return torch.zeros_like(received) if received.grad is None else received.grad


def messages_of(model: nn.Module, engine: Engine, line: Line) -> Messages:
    """The messages of a model's stages, which remember shapes from step to step."""
    messages = _MESSAGES.find(model)
    if messages is None:
        axes = engine.axes
        along, stages = axes.along(axes.stages[0]), len(line.bounds)
        with as_one(model):
            holders = [line.holders(names) for names in parameter_names(model)]
        sharing = sorted({ranks for ranks in holders if len(ranks) > 1})
        messages = _MESSAGES.leave(model, Messages(along, stages, axes.device, sharing))
    return messages


_MESSAGES = Mark[Messages]("terrazzo_messages")
