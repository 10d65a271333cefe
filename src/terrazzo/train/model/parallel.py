"""The model of a run given to ranks that share its matrices or its sequences, between its making and its optimizer."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import terrazzo as tz
from terrazzo.config import Config
from terrazzo.parallel import TensorPlan, TensorRanks, VocabularyLoss, leave_vocabulary
from terrazzo.train.model.decoder import Decoder

__all__ = ["keep_logits_apart", "parallelize_model", "plan_of"]


def parallelize_model(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    """Have `model` share what `plan.mesh` says, as `parallel` says. Collective.

    No rank holds all logits of the built-in decoder where it is cut. A model of transformers puts them together.

    Raises:
        BadInput: on every rank, a model that cannot be cut so.
    """
    settings = config.parallel
    tz.parallelize(
        model,
        mesh,
        tensor=plan_of(model) if config.plan.mesh.tp > 1 else "auto",
        sequence=settings.tensor.sequence,
        context=settings.context.mode,
        balance=settings.context.balance,
    )
    if config.plan.mesh.tp > 1:
        keep_logits_apart(model, mesh)


def plan_of(model: nn.Module) -> TensorPlan | Literal["auto"]:
    """How its matrices are cut."""
    return model.tensor_plan(gathered=False) if isinstance(model, Decoder) else "auto"


def keep_logits_apart(model: nn.Module, ranks: DeviceMesh | TensorRanks) -> None:
    """Have the loss of the built-in decoder be taken from parts of the vocabulary, as `plan_of` leaves them."""
    if isinstance(model, Decoder):
        leave_vocabulary(model, VocabularyLoss(ranks, model.config.vocab_size))
