"""Micro-batches that are not a step's last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from terrazzo.engine.model.engine import engine_of
from terrazzo.errors import BadInput

__all__ = ["accumulate"]


@contextlib.contextmanager
def accumulate(model: nn.Module, *, local: bool | None = None) -> Iterator[None]:
    """Backward passes inside belong to micro-batches that are not the step's last.

    Args:
        local: add their gradients on this rank and send nothing (fewer bytes), or reduce each micro-batch to the plan's
            `grad` place (less memory). By default local where the plan does not split `grad`, else reduced.

    Raises:
        BadInput: `local=False` under a plan that keeps whole gradients, or another `local`.
    """
    if not isinstance(local, bool | None):
        raise BadInput(
            f"tz.accumulate(local={local!r}): give True to add gradients on each rank, False to reduce each "
            "micro-batch, or leave 'local' out."
        )
    engine = engine_of(model)
    before = engine.schedule.fate
    engine.schedule.set_fate(engine.sharding.fate_of(last=False, local=local))
    try:
        yield
    finally:
        engine.schedule.set_fate(before)
