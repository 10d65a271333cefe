"""`tz.step`: all micro-batches of a step, also of a model of which ranks have stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from terrazzo.engine import accumulate, engine_of, stages_of
from terrazzo.engine.labels.label import collective_call, labelled
from terrazzo.engine.labels.purposes import RUN_THE_SAME
from terrazzo.errors import BadInput
from terrazzo.parallel.pipeline.micro_batches import Auxiliary, LossFunction, MicroBatch, called, one_loss
from terrazzo.parallel.pipeline.pipeline_stages import PipelineStages
from terrazzo.parallel.pipeline.schedule_runner import ScheduleRunner
from terrazzo.parallel.pipeline.stage_links import links_of
from terrazzo.parallel.pipeline.step_arguments import StepArguments, compare_counts, compare_stages

__all__ = ["step"]


@labelled(collective_call("tz.step(model, micro_batches, loss_fn)", RUN_THE_SAME))
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
        The sum of the losses of `loss_fn`, 0-d, fp64 where they are and else fp32, detached and the same on all ranks
        along `pp`. Without gradients enabled, nothing else is done.

    Raises:
        BadInput: no micro-batch, other things than pairs, or too few for the pipeline; a loss that is not 0-d.
        RanksApart: before any work, on every rank, where these were given other numbers of micro-batches (without an
            axis `pp`, where the plan exchanges in each of them), or those along `pp` inputs of other forms or with
            other values, or the like. Values are compared in each step on CPUs, and on other devices, for which the
            host would have to wait, in a model's first one.
        Misuse: on every rank, where no micro-batch has sent a gradient back through a stage.
        ConnectionError: where another rank has failed first, or its process has ended: it names that rank, its stage
            and the error. Terrazzo's own errors are raised on every rank as what they are.
    """
    engine, stages = engine_of(model), stages_of(model)
    divisor = engine.progress.denominator

    def read() -> StepArguments:
        _check(micro_batches)
        if denominator is not None:
            model.set_gradient_denominator(denominator)  # type: ignore[operator]
        inputs = [dict(each) if isinstance(each, Mapping) else each for each, _ in micro_batches]
        return StepArguments(inputs, divisor.unscaled, auxiliary is not None)

    if isinstance(stages, PipelineStages):
        links = links_of(model, engine, stages)
        with links.failures.named():
            with divisor.kept_if_refused():
                arguments = compare_stages(engine.axes, links, read)
            pairs = [(inputs, targets) for inputs, (_, targets) in zip(arguments.inputs, micro_batches, strict=True)]
            return ScheduleRunner(model, stages, links, pairs, loss_fn, auxiliary).run()
    with divisor.kept_if_refused():
        compare_counts(model, engine, read)
    total = torch.zeros((), device=engine.axes.device)
    for number, (inputs, targets) in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        with nullcontext() if last or not torch.is_grad_enabled() else accumulate(model):
            loss = one_loss(loss_fn(called(model, inputs), targets))
            if torch.is_grad_enabled():
                aside = None if auxiliary is None else auxiliary(model)
                (loss if aside is None else loss + aside).backward()
        total = total + loss.detach()  # fp64 where that is
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
