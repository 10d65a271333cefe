"""Loss of a micro-batch, validation loss, and text samples: everything that runs the model forward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.train.data import IGNORED, Batch, evaluation_batches
from terrazzo.train.model.causal_lm import generate, logits_of
from terrazzo.train.session import Session, evaluation_limit

__all__ = ["Validation", "evaluate", "sample_text", "summed_loss"]

TEMPERATURE = 0.8
"""Of samples: below 1, the likelier tokens are drawn more often than the model would."""


@dataclass(frozen=True)
class Validation:
    """Mean cross-entropy per token in nats, and the same in bits per byte of text, which no tokenizer can flatter."""

    loss: float
    bits_per_byte: float


def summed_loss(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Cross-entropy in nats, fp32 scalar, summed over the batch's targets that are not ignored."""
    inputs = batch.inputs.to(device, non_blocking=True)
    targets = batch.targets.to(device, non_blocking=True)
    logits = logits_of(model(inputs))
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def evaluate(session: Session) -> Validation | None:
    """The validation loss over the same sequences every time, or None without validation data. Collective."""
    dataset, batch, ranks = session.data.validation, session.config.batch, session.ranks
    if dataset is None:
        return None
    limit = evaluation_limit(session.config, ranks.world_size)
    total = torch.zeros(2, dtype=torch.float64)
    session.model.eval()
    for part in evaluation_batches(dataset, batch.micro_batch, ranks.rank, ranks.world_size, limit):
        loss = summed_loss(session.model, part, ranks.device)
        total += torch.tensor([float(loss), part.valid_tokens], dtype=torch.float64)
    session.model.train()
    dist.all_reduce(total)
    loss_sum, tokens = total.tolist()
    loss_mean = loss_sum / tokens  # more than 0: `open_session` has seen to it
    return Validation(loss_mean, loss_mean / math.log(2) / dataset.bytes_per_token)


def sample_text(session: Session) -> str:
    """Text that the model writes after `train.sample_prompt`; the same on every rank. Collective."""
    train = session.config.train
    prompt = session.data.tokenizer.encode([train.sample_prompt])[0].tolist() or [
        session.data.tokenizer.end_of_document
    ]
    tokens = torch.tensor([prompt], device=session.ranks.device)
    generator = torch.Generator().manual_seed(train.seed + session.step)
    written = generate(session.model, tokens, train.sample_tokens, temperature=TEMPERATURE, generator=generator)
    return session.data.tokenizer.decode(written[0].tolist())
