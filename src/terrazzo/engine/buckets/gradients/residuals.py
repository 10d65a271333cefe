"""What a rank owes of a bucket's gradients: what their codes have lost, added to the next gradients that it encodes.

The formula is in `plan.error_feedback`. A step may be left out behind its backward, or be taken of some parameters
alone: so what was owed before stays until the optimizer has stepped, beside what is owed behind that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from terrazzo.engine.buckets.gradients.block_sums import encode_all
from terrazzo.engine.buckets.resting.buffer import Resting, Space, StateStore
from terrazzo.engine.formats.block_format import BlockCodes
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.error_feedback import OWED_DTYPE, Owed
from terrazzo.engine.plan.layout import Range

__all__ = ["ErrorFeedback", "Residual"]


class _Scaling(Protocol):
    scale: float


class _Unscaled:
    scale = 1.0


class Residual:
    """What this rank owes of the elements that it encodes at one place of a sum: of gradients, or of sums.

    Attributes:
        kind, axes, apart: as of `Owed`.
        kept: behind the last step, from `build` on.
    """

    kept: Resting
    _next: Resting  # behind the step whose gradients are being summed

    def __init__(self, space: Space, owed: Owed) -> None:
        self.kind, self.axes, self.apart, self._space = owed.kind, owed.axes, owed.apart, space
        self._ahead = False  # whether `_next` has other values than `kept`

    def build(self, store: StateStore, tier: str) -> None:
        """Allocate: nothing is owed."""
        self.kept, self._next = (store.state(self._space, self.axes, OWED_DTYPE, tier) for _ in range(2))

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes + self._next.nbytes

    def number_of(self, replicated: bool) -> tuple[int, int] | None:
        """This rank's number among those that owe for themselves of a parameter, and how many these are.

        Args:
            replicated: ranks beside each other compute the same gradient, of which the first one's counts. The others
                send zeros and never owe anything: None.
        """
        axes = self._space.axes
        beside = [axis for axis in self.apart if replicated and axis in axes.summed_beside]
        if not axes.is_first(beside):
            return None
        number, apart = 0, [axis for axis in self.apart if axis not in beside]
        for place, size in axes.cuts(apart):
            number = number * size + place
        return number, axes.size(apart)

    def encode(self, values: Tensor, blocks: BlockCodes, into: Tensor, scale: float) -> None:
        """Replace the blocks `into` by those of `values` and what is owed, of which the loss is owed from now on.

        What is owed of a block that is zero waits: so it makes no difference whether a parameter without a gradient is
        summed, or how often. Of a block that is not finite nothing is known to be lost: it owes what it did before.

        Args:
            values: 1-D, all of this rank's.
            scale: the loss scale that is in them, which is in nothing that is owed.
        """
        before, after = self._next if self._ahead else self.kept, self._next
        start = before.range.start
        for part, packed in blocks.tiles(values):
            elements = Range(start + part.start, start + part.stop)
            with before.opened(elements) as owed, after.opened(elements, "change") as lost:
                rows = values[part].view(-1, blocks.numel)
                waiting, owed = rows.eq(0).all(1, keepdim=True), owed.to(values.device, torch.float32).view_as(rows)
                total = owed.mul(scale).add_(rows).masked_fill_(waiting, 0).view(-1)
                blocks.encode(total, into[packed])
                total = total.sub_(blocks.decode(into[packed])).div_(scale).view_as(rows)
                keeps = waiting | ~total.isfinite().all(1, keepdim=True)
                lost.copy_(torch.where(keeps, owed, total).view(-1))
        self._ahead = True

    def settle(self, stepped: Sequence[Range] | None) -> None:
        """The optimizer has the sums of these elements; None: of all."""
        if not self._ahead:
            return
        if stepped is None:
            self.kept, self._next, self._ahead = self._next, self.kept, False
        else:
            _copy(self._next, self.kept, stepped)

    def forget(self, elements: Sequence[Range] | None) -> None:
        """No step will have what has been sent of these elements since the last one; None: of all."""
        if elements is None:
            self._ahead = False
        elif self._ahead:
            _copy(self.kept, self._next, elements)

    def clear(self, elements: Sequence[Range] | None = None) -> None:
        """Nothing is owed of these elements; None: of all."""
        for each in [self.kept.range] if elements is None else elements:
            with self.kept.opened(each, "replace") as owed:
                owed.zero_()
        self.forget(elements)


def _copy(source: Resting, target: Resting, elements: Sequence[Range]) -> None:
    for each in elements:
        with source.opened(each) as values, target.opened(each, "replace") as copied:
            copied.copy_(values)


class ErrorFeedback:
    """What this rank owes of one bucket; nothing without error feedback.

    Attributes:
        residuals: of gradients, and of sums that are sent in blocks themselves.
    """

    def __init__(self, space: Space, spec: BucketSpec) -> None:
        self.residuals = [Residual(space, owed) for owed in spec.owed]
        self._slots, self._tier = [slot.range for slot in space.layout.slots], spec.feedback_tier
        self._scaling: _Scaling = _Unscaled()

    def build(self, store: StateStore) -> None:
        """Allocate, if anything is owed here."""
        for residual in self.residuals:
            residual.build(store, self._tier)

    def scale_by(self, scaling: _Scaling) -> None:
        """Gradients have been multiplied by this loss scale from now on."""
        self._scaling = scaling

    def encode_gradients(self, values: Tensor, blocks: BlockCodes, into: Tensor) -> None:
        """Replace the blocks `into` by those of `values`, and of what is owed where there is error feedback."""
        self._encode(0, values, blocks, into)

    def encode_sums(self, values: Tensor, blocks: BlockCodes, into: Tensor) -> None:
        """The same of sums of what others have sent in blocks."""
        self._encode(1, values, blocks, into)

    def _encode(self, place: int, values: Tensor, blocks: BlockCodes, into: Tensor) -> None:
        if self.residuals:
            self.residuals[place].encode(values, blocks, into, self._scaling.scale)
        else:
            encode_all(values, blocks, into)

    def settle(self, own: Sequence[int]) -> None:
        """An optimizer takes the gradients of the parameters `own`. Of those without any, what was owed still is."""
        for residual in self.residuals:
            residual.settle(self._elements(own))

    def forget(self, own: Sequence[int] | None = None) -> None:
        """Gradients of the parameters `own`, by default all, are forgotten: what was owed before them is owed."""
        for residual in self.residuals:
            residual.forget(None if own is None else self._elements(own))

    def clear(self, own: Sequence[int]) -> None:
        """Nothing is owed of the parameters `own`."""
        for residual in self.residuals:
            residual.clear(self._elements(own))

    def _elements(self, own: Sequence[int]) -> list[Range] | None:
        return None if len(own) == len(self._slots) else [self._slots[index] for index in own]
