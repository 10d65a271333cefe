"""The gradients of one bucket as its parameters' `.grad` shows them: their stand-ins, set there and taken away."""

from __future__ import annotations

from itertools import compress

from torch import nn

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.interception.gradients.gradient_answers import GradientAnswers
from terrazzo.engine.interception.gradients.gradient_stand_in import GradientStandIn
from terrazzo.engine.mesh.family import Family

__all__ = ["ShownGradients"]


class ShownGradients:
    """The trainable parameters of a bucket and what stands in for their gradients.

    Args:
        first: number of its first parameter among those of the model.

    Attributes:
        numbered: each parameter, with its index and its stand-in.
        shown: those of them whose `.grad` has been set to the stand-in.
    """

    def __init__(self, answers: GradientAnswers, bucket: Bucket, first: int) -> None:
        self.bucket = bucket
        self.is_dense = bucket.family is Family.DENSE
        self.numbered = [
            (index, member.parameter, GradientStandIn.of(member, answers, first + index))
            for index, member in enumerate(bucket.members)
        ]
        self.shown: list[tuple[int, nn.Parameter, GradientStandIn]] = []

    @property
    def wanted(self) -> bool:
        """Whether there is a gradient, be it one that further micro-batches add to."""
        return self.bucket.gradient.exists

    def show(self) -> None:
        """Set `.grad` of each parameter that has a gradient."""
        self.shown = list(compress(self.numbered, self.bucket.gradient.seen))
        for _, parameter, stand_in in self.shown:
            parameter.grad = stand_in

    def hide(self) -> None:
        """Set it to None again."""
        for _, parameter, _ in self.shown if self.wanted else ():  # else the optimizer's zero_grad has done so
            parameter.grad = None
        self.shown = []
