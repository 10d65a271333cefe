"""Whether the model has what a configuration names of it: units, parameters, operators, a head without its logits."""

from __future__ import annotations

from terrazzo.config import Config
from terrazzo.engine import find_units
from terrazzo.errors import BadInput
from terrazzo.train.model.prepare import ModelOnPaper
from terrazzo.train.settings.optimizer import check_names

__all__ = ["check_named"]


def check_named(config: Config, whole: ModelOnPaper) -> None:
    """Look names up in the whole model; nothing is built where there are none.

    Raises:
        BadInput: a name that means nothing there.
    """
    plan, train = config.plan, config.train
    if not (
        plan.units
        or config.optimizer.no_decay
        or config.optimizer.muon.matrices
        or config.optimizer.muon.others
        or train.activation_checkpointing_ops
        or config.objective.loss == "chunked"
    ):
        return
    try:
        find_units(whole.model, plan.units)
    except BadInput as error:
        raise BadInput(f"plan.{error}" if str(error).startswith("units") else str(error)) from None
    check_names(config.optimizer, [name for name, _ in whole.model.named_parameters()])
