"""Validation and text samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
import torch.distributed as dist

from terrazzo.train.data import Asked, evaluation_batches
from terrazzo.train.losses import pair_losses, pair_margins, summed_loss
from terrazzo.train.model.causal_lm import generate
from terrazzo.train.session import Session, evaluation_limit

__all__ = ["Validation", "evaluate", "sample_text"]

TEMPERATURE = 0.8
"""Of samples: below 1, the likelier tokens are drawn more often than the model would."""


@dataclass(frozen=True)
class Validation:
    """The mean loss in nats, per token or per preference pair.

    Of tokens also the same in bits per byte of text, which no tokenizer can flatter; of pairs the share of those that
    are put in their order.
    """

    loss: float
    bits_per_byte: float | None = None
    accuracy: float | None = None

    @property
    def unit(self) -> str:
        """What the number beside the loss is."""
        return "bits per byte" if self.accuracy is None else "of pairs in order"

    def number(self, digits: int) -> str:
        """The number beside the loss, with so many digits behind the point if it is no share."""
        return f"{self.bits_per_byte:.{digits}f}" if self.accuracy is None else f"{self.accuracy:.1%}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`; other names are left out."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    def as_dict(self) -> dict[str, float]:
        """What is known."""
        return {name: value for name, value in vars(self).items() if value is not None}


@torch.no_grad()
def evaluate(session: Session) -> Validation | None:
    """The validation loss over the same sequences every time, or None without validation data. Collective."""
    dataset, batch, ranks = session.data.validation, session.config.batch, session.ranks
    if dataset is None:
        return None
    limit, objective = evaluation_limit(session.config, ranks.world_size), session.config.objective
    total = torch.zeros(3, dtype=torch.float64)
    session.model.eval()
    for part in evaluation_batches(dataset, batch.micro_batch, ranks.rank, ranks.world_size, limit):
        ordered = 0
        if objective.of_pairs:
            margins = pair_margins(objective, session.model, part, ranks.device)[: part.samples]
            loss, ordered = pair_losses(objective, margins).sum(), int((margins > 0).sum())
        else:
            loss = summed_loss(objective, session.model, part, ranks.device)
        total += torch.tensor([float(loss), part.samples, ordered], dtype=torch.float64)
    session.model.train()
    dist.all_reduce(total)
    loss_sum, samples, ordered_sum = total.tolist()
    loss_mean = loss_sum / samples  # more than 0: `open_session` has seen to it
    if objective.of_pairs:
        return Validation(loss_mean, accuracy=ordered_sum / samples)
    return Validation(loss_mean, loss_mean / math.log(2) / dataset.bytes_per_token)


def sample_text(session: Session) -> str:
    """What the model writes after `train.sample_prompt`, or answers to `train.sample_chat`; the same on every rank.

    Collective.
    """
    train = session.config.train
    if session.asked is not None:
        return f"{train.sample_chat} → {_answer(session, session.asked)}"
    tokens = torch.tensor([session.prompt], device=session.ranks.device)
    generator = torch.Generator().manual_seed(train.seed + session.step)
    written = generate(session.model, tokens, train.sample_tokens, temperature=TEMPERATURE, generator=generator)
    return session.data.tokenizer.decode(written[0].tolist())


def _answer(session: Session, asked: Asked) -> str:
    """The likeliest tokens, up to where the answer ends."""
    tokens = torch.tensor([asked.tokens], device=session.ranks.device)
    written = generate(session.model, tokens, session.config.train.sample_tokens, temperature=0.0)[0].tolist()
    answer = itertools.takewhile(lambda token: token not in asked.ends, written[len(asked.tokens) :])
    return session.data.tokenizer.decode(answer)
