"""An optimizer step: forward, backward and update; and a forward that measures the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

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
    total = train_on(session, batch.micro_batches, denominator=max(1, batch.learnt))
    return total, tz.clip_grad_norm_(session.model, session.config.train.clip or math.inf)


def update(session: Session) -> None:
    """The optimizer's step."""
    session.optimizer.step()
    session.optimizer.zero_grad()


def train_on(session: Session, batches: Sequence[Batch], denominator: float) -> Tensor:
    """Forward and backward of all micro-batches of a step; returns the sum of their losses. Collective.

    Args:
        denominator: by which sums of gradients are divided: sums over all ranks, or those of a replica that trains by
            itself.
    """
    objective = objective_of(session.config)
    return _run(session, batches, lambda output, batch: objective.loss_of(session.model, output, batch), denominator)


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
    session: Session, batches: Sequence[Batch], loss_of: Callable[[Any, Batch], Tensor], denominator: float | None
) -> Tensor:
    model, objective = session.model, objective_of(session.config)
    pairs = [(objective.inputs(model, batch, session.ranks.device), batch) for batch in batches]
    return tz.step(model, pairs, loss_of, denominator=denominator, auxiliary=auxiliary_loss)
