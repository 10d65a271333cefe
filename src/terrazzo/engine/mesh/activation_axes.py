"""The axes along which modules of a model exchange activations, and the counts of what they send there."""

from __future__ import annotations

from torch import nn

from terrazzo.engine.instrumentation.traffic import Traffic
from terrazzo.marks import SHARES_EXPERTS, SHARES_MATRICES, SHARES_SEQUENCES

__all__ = ["exchanged_along"]


def exchanged_along(model: nn.Module) -> dict[str, Traffic]:
    """Counts, by mesh axis, of what modules of `model` send of activations along it."""
    marks = {"tp": SHARES_MATRICES, "cp": SHARES_SEQUENCES, "ep": SHARES_EXPERTS}
    return {axis: each.traffic for axis, mark in marks.items() for each in mark.all_in(model)}
