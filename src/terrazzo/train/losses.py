"""Losses: of the next token, and of preference pairs by DPO or by scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.config import ObjectiveConfig
from terrazzo.train.data import IGNORED, Batch
from terrazzo.train.model.causal_lm import logits_of

__all__ = ["completion_log_probs", "pair_losses", "pair_margins", "summed_loss"]


def summed_loss(objective: ObjectiveConfig, model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """In nats, fp32 scalar, summed over the batch's `samples`: targets that are not ignored, or preference pairs."""
    if objective.of_pairs:
        return pair_losses(objective, pair_margins(objective, model, batch, device)[: batch.samples]).sum()
    return _cross_entropy(model, batch, device, "sum")


def pair_margins(objective: ObjectiveConfig, model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """By how much the model prefers each chosen completion, fp32 `[B / 2]`; pairs that only fill the batch come last.

    With DPO that is the difference of implicit rewards, β log π / π_ref (Rafailov et al. 2023, arXiv 2305.18290,
    equation 7), and with `reward` the difference of scores (Ouyang et al. 2022, arXiv 2203.02155, equation 1).
    """
    if objective.name == "reward":
        scores: Tensor = model(batch.inputs.to(device, non_blocking=True), _last(batch).to(device, non_blocking=True))
        found = scores.float().view(-1, 2)
    else:
        assert batch.reference is not None
        reference = batch.reference.to(device, non_blocking=True)
        found = objective.beta * (completion_log_probs(model, batch, device) - reference)
    return found[:, 0] - found[:, 1]


def pair_losses(objective: ObjectiveConfig, margins: Tensor) -> Tensor:
    """Of each pair: the negative log-likelihood of its order, which is the other way round with a small probability."""
    wrong = objective.label_smoothing
    return -(1 - wrong) * F.logsigmoid(margins) - wrong * F.logsigmoid(-margins)


def completion_log_probs(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Log-probabilities of the completions, summed over their tokens: fp32 `[B / 2, 2]`, the chosen one first."""
    losses = _cross_entropy(model, batch, device, "none").view_as(batch.targets)
    return -losses.sum(dim=-1).view(-1, 2)


def _cross_entropy(model: nn.Module, batch: Batch, device: torch.device, reduction: str) -> Tensor:
    """Over all targets in one row, fp32; an ignored one counts as 0."""
    inputs = batch.inputs.to(device, non_blocking=True)
    targets = batch.targets.to(device, non_blocking=True)
    if batch.positions is None:
        output = model(inputs)
    else:
        output = model(inputs, position_ids=batch.positions.to(device, non_blocking=True))
    logits = logits_of(output)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def _last(batch: Batch) -> Tensor:
    """The place of each sequence's last token among the inputs, int64 `[B]`; 0 for one that only fills the batch."""
    places = torch.arange(1, batch.targets.shape[1] + 1).expand_as(batch.targets)
    return torch.where(batch.targets != IGNORED, places, 0).amax(dim=1).clamp(max=batch.targets.shape[1] - 1)
