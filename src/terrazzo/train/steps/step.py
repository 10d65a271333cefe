"""An optimizer step: forward, backward and update; and a forward that measures the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

import terrazzo as tz
from terrazzo.engine import engine_of
from terrazzo.train.data import Batch, GlobalBatch
from terrazzo.train.model.experts import auxiliary_loss
from terrazzo.train.model.objectives import objective_of
from terrazzo.train.session.session import Session

__all__ = ["backward_on", "measure_on", "train_on", "update"]


def backward_on(session: Session, batch: GlobalBatch) -> tuple[Tensor, Tensor]:
    """Forward and backward of every micro-batch, and clipping; `update` follows.

    Returns:
        This rank's sum of the losses of all samples, and the gradients' global norm before clipping.
    """
    engine_of(session.model).traffic.reset()
    learnt = max(1, batch.learnt)
    mean = learnt / max(1, batch.input_tokens)  # routers see prompts too, and the sums are divided by what is learnt
    total = train_on(session, batch.micro_batches, denominator=learnt, auxiliary_scale=mean)
    return total, tz.clip_grad_norm_(session.model, session.config.train.clip or math.inf)


def update(session: Session) -> None:
    """The optimizer's step."""
    session.optimizer.step()
    session.optimizer.zero_grad()


def train_on(session: Session, batches: Sequence[Batch], denominator: float, auxiliary_scale: float = 1.0) -> Tensor:
    """Forward and backward of all micro-batches of a step; returns the sum of their losses. Collective.

    Args:
        denominator: by which sums of gradients are divided: sums over all ranks, or those of a replica that trains by
            itself.
        auxiliary_scale: what auxiliary losses, sums over the tokens that routers have seen, are multiplied by before.
    """
    objective = objective_of(session.config)

    def loss_of(output: Any, batch: Batch) -> Tensor:
        return objective.loss_of(session.model, output, batch)

    return _run(session, batches, loss_of, denominator, auxiliary_scale)


def measure_on(session: Session, batches: Sequence[Batch]) -> tuple[Tensor, float]:
    """The sum of the losses of micro-batches, and for how many samples the model is right. Collective.

    In a pipeline only the last stage knows the second.
    """
    objective, right = objective_of(session.config), 0.0

    def loss_of(output: Any, batch: Batch) -> Tensor:
        nonlocal right
        loss, more = objective.measure(session.model, output, batch)
        right += more
        return loss

    return _run(session, batches, loss_of, None), right


def _run(
    session: Session,
    batches: Sequence[Batch],
    loss_of: Callable[[Any, Batch], Tensor],
    denominator: float | None,
    auxiliary_scale: float = 1.0,
) -> Tensor:
    model, objective = session.model, objective_of(session.config)
    pairs = [(objective.inputs(model, batch, session.ranks.device), batch) for batch in batches]

    def auxiliary(module: nn.Module) -> Tensor | None:
        loss = auxiliary_loss(module)
        return None if loss is None else loss * auxiliary_scale

    return tz.step(model, pairs, loss_of, denominator=denominator, auxiliary=auxiliary)
