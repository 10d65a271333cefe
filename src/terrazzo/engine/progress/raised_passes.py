"""What is known of passes that raised, until gradients are forgotten: what this rank has of them may be a part."""

from __future__ import annotations

from terrazzo.errors import Misuse

__all__ = ["RaisedPasses"]


class RaisedPasses:
    """Forwards and backwards of one model that raised on this rank. Ranks do not compare it: one alone may have failed.

    Attributes:
        abandoned: whether gradients were forgotten because a backward had raised, and nothing has been run since.
    """

    def __init__(self) -> None:
        self.abandoned = self._forward_raised = self._had_gradients = False

    @property
    def any(self) -> bool:
        """Whether a forward or backward has raised since gradients were last forgotten: there may be none here, where
        other ranks have some.
        """
        return self._forward_raised or self.abandoned

    def forward_raised(self, differentiated: bool) -> None:
        """Note that a forward has raised."""
        self._forward_raised |= differentiated

    def begin_backward(self, has_gradients: bool) -> None:
        """Note that a backward begins, where there are gradients of other micro-batches or not."""
        self._had_gradients = has_gradients

    def backward_raised(self) -> None:
        """Note that gradients were forgotten because a backward had raised."""
        self.abandoned = True

    def step_raised(self) -> None:
        """Note that gradients of all micro-batches were forgotten because one of a step in stages had raised."""
        self.abandoned = self._had_gradients = True

    def gradients_zeroed(self) -> None:
        """Note that the user has forgotten gradients, or set them to zero: the step can be run again."""
        self.abandoned = self._forward_raised = False

    def begin_forward(self) -> None:
        """A differentiated forward begins: after a backward that raised, it is the same micro-batch again.

        Raises:
            Misuse: where gradients of earlier micro-batches went with that backward.
        """
        if self.abandoned and self._had_gradients:
            raise Misuse(
                "A forward came after a backward that raised, and that took what earlier micro-batches had left with "
                "it: optimizer.step() would use later ones alone. Call optimizer.zero_grad(), and run all "
                "micro-batches of the step again."
            )
        self.abandoned = False
