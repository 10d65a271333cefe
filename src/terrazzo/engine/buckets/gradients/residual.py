"""Residuals: what codes of gradients have lost on this rank, which error feedback adds to the next ones it encodes.

The formula is in `plan.error_feedback`. A step may be left out after its backward, or be taken of some parameters
alone: so a residual is in memory twice, as the last step has left it and as the next one will.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import Resting, Space, StateStore
from terrazzo.engine.formats.block_format import BlockCodes
from terrazzo.engine.plan.error_feedback import RESIDUAL_DTYPE, ResidualSpec
from terrazzo.engine.plan.layout import Range

__all__ = ["Residual"]


class Residual:
    """Residual of the elements of one bucket that this rank encodes: of gradients, or of their sums.

    Methods are given the indices of parameters; None means all.

    Attributes:
        spec: which elements, and along which axes ranks have one of their own.
        committed: as the last step has left it; zero at first.
    """

    def __init__(self, space: Space, spec: ResidualSpec, tier: str, store: StateStore) -> None:
        self.spec, self._space = spec, space
        self._is_encoded = False  # whether gradients have been encoded that no step has taken
        self.committed = store.state(space, spec.axes, RESIDUAL_DTYPE, tier)
        # As the step leaves it whose gradients are being summed, where `_is_encoded`.
        self._uncommitted = store.state(space, spec.axes, RESIDUAL_DTYPE, tier)

    @property
    def nbytes(self) -> int:
        return self.committed.nbytes + self._uncommitted.nbytes

    def encode(self, values: Tensor, blocks: BlockCodes, into: Tensor, loss_scale: float) -> None:
        """Replace the blocks `into` by those of `values` and the residual, which is what they lose from now on.

        Of a block that is zero it stays: so it makes no difference whether a parameter without a gradient is summed,
        or how often. Of a block that is not finite nothing is known to be lost: it stays, too.

        Args:
            values: 1-D, all of this rank's.
            loss_scale: that is in them, and not in the residual.
        """
        before, after = self._uncommitted if self._is_encoded else self.committed, self._uncommitted
        start = before.range.start
        for part, coded in blocks.tiles(values):
            elements = Range(start + part.start, start + part.stop)
            with before.opened(elements) as residual, after.opened(elements, "change") as lost:
                rows = values[part].view(-1, blocks.numel)
                waits = rows.eq(0).all(1, keepdim=True)
                residual = residual.to(values.device, torch.float32).view_as(rows)
                total = residual.mul(loss_scale).add_(rows).masked_fill_(waits, 0).view(-1)
                blocks.encode(total, into[coded])
                total = total.sub_(blocks.decode(into[coded])).div_(loss_scale).view_as(rows)
                stays = waits | ~total.isfinite().all(1, keepdim=True)
                lost.copy_(torch.where(stays, residual, total).view(-1))
        self._is_encoded = True

    def commit(self, own: Sequence[int]) -> None:
        """Note that an optimizer takes the sums of these parameters."""
        if not self._is_encoded:
            return
        if (elements := self._elements(own)) is None:
            self.committed, self._uncommitted, self._is_encoded = self._uncommitted, self.committed, False
        else:
            _copy(self._uncommitted, self.committed, elements)

    def roll_back(self, own: Sequence[int] | None = None) -> None:
        """Drop what has been encoded of these parameters since the last step: no step will take it."""
        if (elements := self._elements(own)) is None:
            self._is_encoded = False
        elif self._is_encoded:
            _copy(self.committed, self._uncommitted, elements)

    def clear(self, own: Sequence[int] | None = None) -> None:
        """Set the residual of these parameters to zero."""
        elements = self._elements(own)
        for each in [self.committed.range] if elements is None else elements:
            with self.committed.opened(each, "replace") as residual:
                residual.zero_()
        self.roll_back(own)

    def _elements(self, own: Sequence[int] | None) -> list[Range] | None:
        """Elements of these parameters; None where they are all."""
        slots = self._space.layout.slots
        return None if own is None or len(own) == len(slots) else [slots[index].range for index in own]


def _copy(source: Resting, target: Resting, elements: Sequence[Range]) -> None:
    for each in elements:
        with source.opened(each) as values, target.opened(each, "replace") as copied:
            copied.copy_(values)
