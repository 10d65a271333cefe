"""A bucket's gradient on this rank as autograd brings it: not summed over ranks yet."""

from __future__ import annotations

from torch import Tensor

from terrazzo.engine.buckets.buffer import view
from terrazzo.engine.plan.layout import Layout

__all__ = ["UnreducedGradient"]


class UnreducedGradient:
    """Elements of every parameter of a flat space, of which some have a gradient by now.

    Args:
        data: memory for the whole space, whatever is in it.
        lent: whether that is the side's, and lent to the computation; else it is the computation's own.

    Attributes:
        filled: for each parameter, whether it has a gradient here; the elements of others mean nothing.
    """

    def __init__(self, layout: Layout, data: Tensor, lent: bool) -> None:
        self.data, self.lent, self._slots = data, lent, layout.slots
        self.filled = [False] * len(layout.slots)
        for gap in layout.gaps:
            data[gap.start : gap.stop].zero_()

    def add(self, index: int, grad: Tensor) -> None:
        """Add to the gradient of one parameter, or be it."""
        target = view(self.data, self._slots[index])
        if self.filled[index]:
            target.add_(grad)
        else:
            target.copy_(grad)
        self.filled[index] = True

    def forget(self, index: int) -> None:
        """One parameter has no gradient here any more."""
        self.filled[index] = False

    def complete(self) -> Tensor:
        """All elements; parameters that have no gradient here get one of zeros."""
        for slot, filled in zip(self._slots, self.filled, strict=True):
            if not filled:
                self.data[slot.range.start : slot.range.stop].zero_()
        self.filled = [True] * len(self.filled)
        return self.data
