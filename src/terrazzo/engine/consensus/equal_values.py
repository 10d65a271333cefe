"""Tensors that are to be equal on all ranks: those that differ take the first rank's values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terrazzo.engine.consensus.digest import digest
from terrazzo.engine.mesh.axes import Axes

__all__ = ["synchronize"]


def synchronize(tensors: Sequence[Tensor], axes: Axes, along: tuple[str, ...]) -> None:
    """Make `tensors` equal on all ranks of the axes: those that differ take the first rank's values."""
    if not axes.live(along) or not tensors:
        return
    by_number = {str(number): tensor for number, tensor in enumerate(tensors)}
    for number in axes.differing({number: digest(tensor) for number, tensor in by_number.items()}, along):
        value = by_number[number].detach().to(axes.device).contiguous()
        axes.broadcast(value, along)
        with torch.no_grad():
            by_number[number].copy_(value)
