"""Validation and text samples; and micro-batches through stages, to learn from them or to validate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

import terrazzo as tz
from terrazzo.parallel import whole_sequences
from terrazzo.train.data import Asked, Batch, evaluation_batches
from terrazzo.train.model.causal_lm import generate
from terrazzo.train.model.experts import auxiliary_loss
from terrazzo.train.objectives import NextToken, Validation, objective_of
from terrazzo.train.session import Session, evaluation_limit

__all__ = ["evaluate", "in_stages", "sample_text"]

TEMPERATURE = 0.8
"""Of samples: below 1, the likelier tokens are drawn more often than the model would."""


@torch.no_grad()
def evaluate(session: Session) -> Validation | None:
    """The validation loss over the same sequences every time, or None without validation data. Collective.

    What is compared with the model of the first step prefers nothing then: rounding that says otherwise is not heard.
    """
    dataset, batch, ranks = session.data.validation, session.config.batch, session.ranks
    if dataset is None:
        return None
    parts, objective = session.parts, objective_of(session.config)
    limit = evaluation_limit(session.config, parts.readers)
    undecided = session.step == 0 and session.config.objective.kind.against_initial
    total = torch.zeros(3, dtype=torch.float64)
    session.model.eval()
    batches = map(parts.of, evaluation_batches(dataset, batch.micro_batch, parts.reader, parts.readers, limit))
    if session.config.plan.mesh.pp > 1:
        held = [*batches]
        total[0], total[1] = in_stages(session, held), sum(part.samples for part in held)
    for part in batches:
        loss, right = objective.measure(session.model, part, ranks.device)
        right = part.samples / 2 if undecided else right
        total += torch.tensor([float(loss), part.samples, right], dtype=torch.float64)
    session.model.train()
    loss_sum, samples, right_sum = parts.total(total).tolist()  # samples: more than 0, `open_session` has seen to it
    return objective.validation(loss_sum / samples, right_sum / samples, dataset.bytes_per_token)


def in_stages(session: Session, batches: Sequence[Batch], denominator: float | None = None) -> Tensor:
    """Forward, and where gradients are enabled backward, of micro-batches through the stages that ranks have.

    Returns the sum of their losses, on all ranks of a pipeline. Collective.
    """
    model, device, objective = session.model, session.ranks.device, objective_of(session.config)
    assert isinstance(objective, NextToken)
    return tz.step(
        model,
        [objective.micro_batch(model, each, device) for each in batches],
        lambda output, targets: objective.loss_of(model, output, targets),
        denominator=denominator,
        auxiliary=auxiliary_loss,
    )


def sample_text(session: Session) -> str:
    """What the model writes after `train.sample_prompt`, or answers to `train.sample_chat`; the same on every rank.

    Collective.
    """
    train = session.config.train
    if session.asked is not None:
        return f"{train.sample_chat} → {_answer(session, session.asked)}"
    tokens = torch.tensor([session.prompt], device=session.ranks.device)
    generator = torch.Generator().manual_seed(train.seed + session.step)
    with whole_sequences(session.model):
        written = generate(session.model, tokens, train.sample_tokens, temperature=TEMPERATURE, generator=generator)
    return session.data.tokenizer.decode(written[0].tolist())


def _answer(session: Session, asked: Asked) -> str:
    """The likeliest tokens, up to where the answer ends."""
    tokens = torch.tensor([asked.tokens], device=session.ranks.device)
    with whole_sequences(session.model):
        written = generate(session.model, tokens, session.config.train.sample_tokens, temperature=0.0)[0]
    answer = itertools.takewhile(lambda token: token not in asked.ends, written[len(asked.tokens) :].tolist())
    return session.data.tokenizer.decode(answer)
