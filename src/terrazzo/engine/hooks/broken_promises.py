"""What a model runs otherwise than its memory bill and promised traffic were made for: said once, as it is seen."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.engine.buckets.unit import Unit
from terrazzo.messages import warn

__all__ = ["BrokenPromises"]


class BrokenPromises:
    """The promises of one model that its forwards have been seen to break.

    Args:
        units: in registration order, root first.
        says_order: whether this rank is the one that says of which order units run in, which is the same on all.
    """

    def __init__(self, units: Sequence[Unit], says_order: bool) -> None:
        self._units, self._says_order = units, says_order
        self._warned_of_backward = self._warned_of_order = False

    def backward_to_come(self, unit: Unit) -> None:
        """Say that a backward comes to a unit which is only promised forwards."""
        if not self._warned_of_backward:
            self._warned_of_backward = True
            warn(
                f"Backward comes to {unit.title}, which is frozen and registered in front of all that is trained: an "
                "input requires gradients, or what is trained runs before it. The memory bill and the promised traffic "
                "were made without it; asked again after this step they have it. Give inputs without requires_grad "
                "(transformers: without enable_input_require_grads()) unless their gradients are wanted, and register "
                "modules in the order in which they run."
            )

    def order_agreed(self, forward: Sequence[int]) -> None:
        """Say where units run in another order than they are registered in, and units of another size come so: what a
        step holds at once is another then, and so was the bill.

        Args:
            forward: units in the order in which they run, some more than once.
        """
        order = [self._units[index] for index in dict.fromkeys(forward)]
        registered = sorted(order, key=lambda unit: unit.index)
        moved = [pair for pair in zip(order, registered, strict=True) if pair[0] is not pair[1]]
        if self._warned_of_order or all(ran.numel == own.numel for ran, own in moved):
            return
        self._warned_of_order = True
        if self._says_order:
            ran, own = moved[0]
            warn(
                f"Units run in another order than they are registered in: {ran.title} before {own.title}. The memory "
                "bill and the promised traffic were made for the order of registration; asked again after this step "
                "they are of what runs. Register modules in the order in which they run, and they are right before it."
            )
