"""Lists of numbers, as many as each rank has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.runtime.device import HOST

__all__ = ["number_rows"]

_NONE = -1


def number_rows(axes: Axes, own: Sequence[int], along: Iterable[str]) -> list[list[int]]:
    """The numbers of every rank along some axes, none of which is negative; this rank's are `own`. Collective."""
    along = tuple(along)
    longest = int(axes.maximum(torch.tensor([len(own)], device=HOST), along).item())
    padded = torch.tensor([*own, *[_NONE] * (longest - len(own))], dtype=torch.int64, device=HOST)
    return [[number for number in row if number != _NONE] for row in axes.rows(padded, along).tolist()]
