"""Whether the model has the units, parameters and operators that a configuration names."""

from __future__ import annotations

from terrazzo.config import Config
from terrazzo.engine import find_units
from terrazzo.errors import BadInput
from terrazzo.train.model.prepare import ModelOnPaper
from terrazzo.train.settings.optimizer import check_names

__all__ = ["check_named"]


def check_named(config: Config, whole: ModelOnPaper) -> None:
    """Look names up in the whole model, which is built only if there are any.

    Raises:
        BadInput: the model has nothing of a name.
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
