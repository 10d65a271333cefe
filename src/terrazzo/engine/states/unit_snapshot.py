"""A snapshot of what one rank holds of one unit, compared later: at rest nothing changes by itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from terrazzo.engine.model.engine import Engine
from terrazzo.engine.states.pieces import Piece, held_pieces

__all__ = ["UnitSnapshot"]


class UnitSnapshot:
    """The states of a unit as they are now, after an update and before the next forward.

    Sums of bit patterns stand for them: quicker to take than a checksum, and any one bit that flips changes them.

    Attributes:
        title: of the unit.
    """

    def __init__(self, engine: Engine, unit: int) -> None:
        self._engine, self._unit = engine, engine.units[unit]
        self.title = self._unit.title
        self._gathered: list[Tensor] = []
        self._before = [(piece, _sum(piece.tensor)) for piece in self._pieces()]
        self._unit.weights.call_when_present(self._look_at_gathered)

    def _pieces(self) -> Iterator[Piece]:
        return held_pieces(self._unit.buckets, self._engine.drivers.stepping())

    def _look_at_gathered(self) -> None:
        self._gathered = [_sum(bucket.full.data) for bucket in self._unit.buckets]

    def changed(self) -> list[str]:
        """List what has changed since, before the update that may change it: name and state of each parameter."""
        now = [_sum(piece.tensor) for piece in self._pieces()]
        if len(now) != len(self._before):
            return []  # an optimizer has been exchanged meanwhile
        differ = torch.stack([a != b for (_, a), b in zip(self._before, now, strict=True)]).tolist() if now else []
        return [f"{piece.name}, {piece.kind}" for (piece, _), other in zip(self._before, differ, strict=True) if other]

    def gathered(self) -> list[tuple[list[tuple[int, int]], int]]:
        """Each bucket's full weights at their first use since; empty without a use.

        Returns:
            This rank's coordinates along axes whose ranks have other weights there, and a sum, which is equal on all
            ranks that have these coordinates.
        """
        self._unit.weights.call_when_present(None)
        axes = self._engine.axes
        apart = [axes.coordinates((*axes.stage_axis, *axes.cut_along(each.family))) for each in self._unit.buckets]
        sums = torch.stack(self._gathered).tolist() if self._gathered else []
        return list(zip(apart, sums, strict=False))


def _sum(tensor: Tensor) -> Tensor:
    """Sum of the bit patterns of all elements, eight bytes at a time: 0-d int64, which overflows. Waits for nothing."""
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    width, word = 8 // flat.element_size(), _WORDS[flat.element_size()]
    start = min(-flat.storage_offset() % width, flat.numel())
    stop = start + (flat.numel() - start) // width * width
    edges = [flat[part].view(word).sum(dtype=torch.int64) for part in (slice(0, start), slice(stop, None))]
    return flat[start:stop].view(torch.int64).sum() + edges[0] + edges[1]


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
