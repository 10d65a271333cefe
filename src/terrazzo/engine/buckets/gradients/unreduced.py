"""A bucket's gradient on this rank as autograd brings it: not summed over ranks yet."""

from __future__ import annotations

from torch import Tensor

from terrazzo.engine.buckets.resting.buffer import view
from terrazzo.engine.plan.layout import Layout

__all__ = ["UnreducedGradient"]


class UnreducedGradient:
    """A buffer for the gradients of all parameters of a flat space, some of which have come.

    Args:
        data: uninitialised memory for the whole space.
        lent: whether the memory is the communication stream's, lent to the computation; else it is the computation's.

    Attributes:
        filled: for each parameter, whether its gradient has come; the elements of the others mean nothing.
    """

    def __init__(self, layout: Layout, data: Tensor, lent: bool) -> None:
        self.data, self.lent, self._slots = data, lent, layout.slots
        self.filled = [False] * len(layout.slots)
        for gap in layout.gaps:
            data[gap.start : gap.stop].zero_()

    def add(self, index: int, grad: Tensor) -> None:
        """Add `grad` to the gradient of one parameter; the first one is copied."""
        target = view(self.data, self._slots[index])
        if self.filled[index]:
            target.add_(grad)
        else:
            target.copy_(grad)
        self.filled[index] = True

    def forget(self, index: int) -> None:
        """Forget the gradient of one parameter."""
        self.filled[index] = False

    def complete(self) -> Tensor:
        """Return all elements; parameters without a gradient get zeros."""
        for slot, filled in zip(self._slots, self.filled, strict=True):
            if not filled:
                self.data[slot.range.start : slot.range.stop].zero_()
        self.filled = [True] * len(self.filled)
        return self.data
