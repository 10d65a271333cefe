"""How many tensors as large as a parameter each optimizer keeps of it: those of torch.optim and those beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["further_moments", "moments_of"]

_MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop"), 2),
    **dict.fromkeys(("Adagrad", "RMSprop", "ASGD", "Lion"), 1),
    "Muon": 1,
    "AdEMAMix": 3,
    "SGD": 0,
    "Adafactor": 0,
}
"""What torch/optim/*.py keeps: Muon, of a matrix; Adafactor's rows and columns are too small to count."""
_MORE = ("amsgrad", "momentum", "centered")
"""Arguments of elementwise optimizers that add one, where they are neither zero nor false."""


def moments_of(name: str, options: Mapping[str, Any]) -> int | None:
    """The number, by the name of a class of torch.optim or tz.optim and its arguments; None for a class of others."""
    if name not in _MOMENTS or name == "Muon":
        return _MOMENTS.get(name)
    return _MOMENTS[name] + further_moments(options)


def further_moments(options: Mapping[str, Any]) -> int:
    """What these arguments of an elementwise optimizer add to it."""
    return sum(bool(options.get(each)) for each in _MORE)
