"""The model of a run given to ranks that share its matrices or its sequences, between its making and its optimizer."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import terrazzo as tz
from terrazzo.config import Config
from terrazzo.parallel import VocabularyLoss, leave_vocabulary
from terrazzo.train.model.decoder import Decoder

__all__ = ["parallelize_model"]


def parallelize_model(model: nn.Module, config: Config, mesh: DeviceMesh) -> None:
    """Have `model` share what `plan.mesh` says, as `parallel` says. Collective.

    No rank holds all logits of the built-in decoder where it is cut. A model of transformers puts them together.

    Raises:
        BadInput: on every rank, a model that cannot be cut so.
    """
    settings = config.parallel
    decoder = model if config.plan.mesh.tp > 1 and isinstance(model, Decoder) else None
    tz.parallelize(
        model,
        mesh,
        tensor="auto" if decoder is None else decoder.tensor_plan(gathered=False),
        sequence=settings.tensor.sequence,
        context=settings.context.mode,
        balance=settings.context.balance,
    )
    if decoder is not None:
        leave_vocabulary(model, VocabularyLoss(mesh, decoder.config.vocab_size))
