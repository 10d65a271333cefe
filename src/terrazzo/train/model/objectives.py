"""Objectives: for each name of `objective` a class with its model, its loss, and what a validation measures.

What data and configuration need to know about an objective, before there is a model, is in `config.ObjectiveKind`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo import checkpoint
from terrazzo.config import Config
from terrazzo.parallel import context_of, vocabulary_of
from terrazzo.planner import ModelShape
from terrazzo.train.data import IGNORED, Batch
from terrazzo.train.model.causal_lm import build_model, logits_of
from terrazzo.train.model.decoder import Decoder, DecoderConfig
from terrazzo.train.model.expert_load import PADDING_MASK, counts_rows
from terrazzo.train.model.head_loss import TARGETS, gives_loss
from terrazzo.train.model.lora import add_adapters, load_base
from terrazzo.train.model.reward import build_reward_model, load_body, with_score

__all__ = [
    "CLASSES",
    "DPO",
    "Inputs",
    "NextToken",
    "Objective",
    "Reward",
    "Validation",
    "completion_log_probs",
    "inputs_of",
    "is_known",
    "objective_of",
]

Inputs = dict[str, Tensor]
"""What a model is called with, by name."""


@dataclass(frozen=True)
class Validation:
    """The result of a validation.

    Attributes:
        loss: the mean in nats, per token or per preference pair.
        bits_per_byte: for tokens, the loss in bits per byte of text, which does not depend on the tokenizer.
        accuracy: for pairs, the share in which the chosen completion is preferred; ties count half.
    """

    loss: float
    bits_per_byte: float | None = None
    accuracy: float | None = None

    @property
    def unit(self) -> str:
        """The unit of `number`."""
        return "bits per byte" if self.accuracy is None else "of pairs in order"

    def number(self, digits: int) -> str:
        """The number that is shown beside the loss; bits per byte with `digits` decimals, or accuracy in percent."""
        return f"{self.bits_per_byte:.{digits}f}" if self.accuracy is None else f"{self.accuracy:.1%}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`; other keys are ignored."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    def as_dict(self) -> dict[str, float]:
        """The known finite values by name: JSON has no infinity."""
        return {name: value for name, value in vars(self).items() if value is not None and math.isfinite(value)}


class Objective(ABC):
    """What a run learns. A sample is a target token that is not ignored, or a preference pair."""

    def __init__(self, config: Config) -> None:
        self.config = config

    # -- the model -------------------------------------------------------------------------------------------------

    def build(self, spec: DecoderConfig | Path) -> nn.Module:
        """The model of `spec` on the meta device, with what the configuration puts on it."""
        model = build_model(spec, device="meta", dropout=not self.config.objective.kind.against_initial)
        return add_adapters(model, self.config)

    def load_pretrained(self, model: nn.Module, folder: Path) -> None:
        """Load a model folder's weights into the sharded model. Collective."""
        (checkpoint.load_weights if self.config.lora.rank is None else load_base)(model, folder)

    def shape(self, shape: ModelShape) -> ModelShape:
        """The planner's view of `build`, from that of a language model."""
        return shape

    # -- the loss --------------------------------------------------------------------------------------------------

    def inputs(self, model: nn.Module, batch: Batch, device: torch.device) -> Inputs:
        """What the model is called with, by name."""
        return inputs_of(model, batch, device)

    @abstractmethod
    def loss_of(self, model: nn.Module, output: Any, batch: Batch) -> Tensor:
        """The loss in nats as an fp32 scalar, summed over the batch's `samples`.

        Args:
            output: what the model has returned for `inputs`.
        """

    def measure(self, model: nn.Module, output: Any, batch: Batch) -> tuple[Tensor, float]:
        """`loss_of`, and for how many samples the model is right; 0 if the objective does not say."""
        return self.loss_of(model, output, batch), 0

    @abstractmethod
    def validation(self, loss: float, right: float, bytes_per_token: float) -> Validation:
        """The validation with these means per sample."""


class NextToken(Objective):
    """Cross-entropy of every token that is learnt, from logits, or as the model has computed it without them."""

    def inputs(self, model: nn.Module, batch: Batch, device: torch.device) -> Inputs:
        inputs = super().inputs(model, batch, device)
        return inputs | {TARGETS: batch.targets.to(device, non_blocking=True)} if gives_loss(model) else inputs

    def loss_of(self, model: nn.Module, output: Any, batch: Batch) -> Tensor:
        if gives_loss(model):
            return logits_of(output)
        return _cross_entropy(model, output, batch, "sum")

    def validation(self, loss: float, right: float, bytes_per_token: float) -> Validation:
        return Validation(loss, bits_per_byte=loss / math.log(2) / bytes_per_token)


class _Pairs(Objective):
    """Preference of one completion over another: a logistic loss of the margin between them."""

    @abstractmethod
    def preferences(self, model: nn.Module, output: Any, batch: Batch) -> Tensor:
        """The model's preference for each completion, fp32 `[B / 2, 2]`, the chosen one first."""

    def margins(self, model: nn.Module, output: Any, batch: Batch) -> Tensor:
        """How much more the chosen completion of each pair is preferred, fp32 `[samples]`."""
        preferences = self.preferences(model, output, batch)
        return (preferences[:, 0] - preferences[:, 1])[: batch.samples]  # pairs that only fill the batch come last

    def losses(self, margins: Tensor) -> Tensor:
        """The negative log-likelihood of each pair's order, with labels wrong by probability `label_smoothing`."""
        wrong = self.config.objective.label_smoothing
        return -(1 - wrong) * F.logsigmoid(margins) - wrong * F.logsigmoid(-margins)

    def loss_of(self, model: nn.Module, output: Any, batch: Batch) -> Tensor:
        return self.losses(self.margins(model, output, batch)).sum()

    def measure(self, model: nn.Module, output: Any, batch: Batch) -> tuple[Tensor, float]:
        margins = self.margins(model, output, batch)
        return self.losses(margins).sum(), float((margins.sign() + 1).sum() / 2)

    def validation(self, loss: float, right: float, bytes_per_token: float) -> Validation:
        return Validation(loss, accuracy=right)


class DPO(_Pairs):
    """Implicit rewards, β log π / π_ref (Rafailov et al. 2023, arXiv 2305.18290, equation 7)."""

    def inputs(self, model: nn.Module, batch: Batch, device: torch.device) -> Inputs:
        if batch.reference is None or not is_known(batch):
            raise RuntimeError(
                "A preference pair was read whose log-probabilities under the model before the first step were not"
                " computed, so that its loss would be NaN: this is an error in Terrazzo."
            )
        return super().inputs(model, batch, device)

    def preferences(self, model: nn.Module, output: Any, batch: Batch) -> Tensor:
        assert batch.reference is not None
        own = completion_log_probs(model, output, batch)
        return self.config.objective.beta * (own - batch.reference.to(own.device, non_blocking=True))


class Reward(_Pairs):
    """Scores (Ouyang et al. 2022, arXiv 2203.02155, equation 1)."""

    def build(self, spec: DecoderConfig | Path) -> nn.Module:
        return build_reward_model(spec, torch.device("meta"))

    def load_pretrained(self, model: nn.Module, folder: Path) -> None:
        load_body(model, folder)

    def shape(self, shape: ModelShape) -> ModelShape:
        return with_score(shape)

    def inputs(self, model: nn.Module, batch: Batch, device: torch.device) -> Inputs:
        tensors = {"tokens": batch.inputs, "last": _last(batch), **_padding(model, batch)}
        return {name: _moved(value, device) for name, value in tensors.items()}

    def preferences(self, model: nn.Module, output: Any, batch: Batch) -> Tensor:
        scores: Tensor = output
        return scores.float().view(-1, 2)


CLASSES: dict[str, type[Objective]] = {"next_token": NextToken, "dpo": DPO, "reward": Reward}


def objective_of(config: Config) -> Objective:
    """The objective that a configuration names."""
    return CLASSES[config.objective.name](config)


def inputs_of(model: nn.Module, batch: Batch, device: torch.device) -> Inputs:
    """What a language model is called with, by name."""
    context, inputs = context_of(model), {"input_ids": _moved(batch.inputs, device)}
    if batch.positions is not None:
        place = _moved if context is None else context.place
        inputs["position_ids"] = place(batch.positions, device)
    if batch.prefixes is not None:
        place_prefix = _moved if context is None else context.place_prefix
        inputs["prefix_lengths"] = place_prefix(batch.prefixes, device)
    return inputs | {name: _moved(mask, device) for name, mask in _padding(model, batch).items()}


def _padding(model: nn.Module, batch: Batch) -> Inputs:
    """The padding mask, where there is padding, and experts that are counted."""
    takes = counts_rows(model) or (isinstance(model, Decoder) and model.config.experts is not None)
    return {} if batch.padding_mask is None or not takes else {PADDING_MASK: batch.padding_mask}


def is_known(batch: Batch) -> bool:
    """Whether the references of a micro-batch's pairs are known, if it has any."""
    return batch.reference is None or not bool(batch.reference[: batch.samples].isnan().any())


def completion_log_probs(model: nn.Module, output: Any, batch: Batch) -> Tensor:
    """Log-probabilities of the completions, summed over their tokens: fp32 `[B / 2, 2]`, the chosen one first."""
    losses = _cross_entropy(model, output, batch, "none").view_as(batch.targets)
    return -losses.sum(dim=-1).view(-1, 2)


def _cross_entropy(model: nn.Module, output: Any, batch: Batch, reduction: Literal["sum", "none"]) -> Tensor:
    """Cross-entropy in fp32 over all targets, flattened; ignored ones count as 0."""
    rows = logits_of(output).flatten(0, -2)
    targets = batch.targets.to(rows.device, non_blocking=True).flatten()
    if (vocabulary := vocabulary_of(model)) is not None:
        return vocabulary(rows, targets, reduction)
    return F.cross_entropy(rows.float(), targets, ignore_index=IGNORED, reduction=reduction)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)


def _last(batch: Batch) -> Tensor:
    """The position of each sequence's last token in the inputs, int64 `[B]`; 0 for rows that only fill the batch."""
    positions = torch.arange(1, batch.targets.shape[1] + 1).expand_as(batch.targets)
    return torch.where(batch.targets != IGNORED, positions, 0).amax(dim=1).clamp(max=batch.targets.shape[1] - 1)
