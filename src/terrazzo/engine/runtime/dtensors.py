"""Torch's DTensors, told from plain tensors without their module, whose import takes a second."""

from __future__ import annotations

import sys

from torch import Tensor

__all__ = ["is_dtensor", "whole_dtensor"]


def is_dtensor(value: Tensor) -> bool:
    """Whether a tensor is torch's DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def whole_dtensor(value: Tensor) -> Tensor:
    """A DTensor gathered, for which all ranks of its mesh must ask; any other tensor as it is."""
    return value.full_tensor() if is_dtensor(value) else value  # type: ignore[attr-defined]
