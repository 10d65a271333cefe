"""States of each bucket in checkpoints beside an optimizer's: where they are, and which ranks hold the same of them.

A further state is a line of `saved_states`. Saving (`pieces`), comparing copies, and restoring (`restore`) walk these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.gradients.residual import Residual
from terrazzo.engine.buckets.resting.buffer import Buffer, Resting
from terrazzo.engine.plan.diloco import OUTER_MOMENTUM
from terrazzo.engine.plan.layout import Range
from terrazzo.engine.plan.partition import Member
from terrazzo.engine.plan.state_names import numbered
from terrazzo.engine.runtime.calls import do_nothing

__all__ = ["SavedState", "copied_along", "saved_states", "saved_weights", "share_in_replica"]


_NOTHING = Range(0, 0)


@dataclass(frozen=True)
class SavedState:
    """One state of a bucket.

    Attributes:
        kind: what it is called of a parameter, before the number of a rank that has one of its own.
        state: what this rank holds of it.
        share: what this rank gives of that: over all ranks each element comes once.
        copied_along: the axes with more than one rank along which ranks hold copies of that.
        before_restoring: is called first: it zeroes the state (momentum and residuals), or notes that it changes.
        residual: the residual that the state belongs to; None if it is another kind of state.
    """

    bucket: Bucket
    kind: str
    state: Resting
    share: Range
    copied_along: tuple[str, ...]
    before_restoring: Callable[[], None] = do_nothing
    residual: Residual | None = None

    def kind_of(self, member: Member) -> str | None:
        """Name of this rank's state of a parameter; None where another rank's gradient of it counts."""
        if self.residual is None:
            return self.kind
        number = self.residual.number_of(member.replicated)
        return None if number is None else numbered(self.kind, number[0])


def saved_weights(buckets: Iterable[Bucket]) -> Iterator[SavedState]:
    """Yield the weights of buckets: master weights where there are any, which the others follow once published."""
    for bucket in buckets:
        state = bucket.exact if bucket.spec.trainable else bucket.weight
        yield SavedState(bucket, "weight", state, _share(bucket), copied_along(bucket), bucket.note_change)


def saved_states(buckets: Iterable[Bucket], averages: Mapping[Bucket, Buffer]) -> Iterator[SavedState]:
    """Yield what is saved with an optimizer: averages of weights, the momentum of outer steps, residuals of codes.

    The weights that outer steps go on from are the model's, between two rounds.
    """
    trainable = [bucket for bucket in buckets if bucket.spec.trainable]
    for bucket in (bucket for bucket in trainable if bucket in averages):
        yield SavedState(bucket, "average", averages[bucket], _share(bucket), copied_along(bucket))
    for bucket in trainable:
        axes = bucket.axes
        along = axes.live(axis for axis in (*axes.summed_over, *axes.replicas) if axis not in bucket.spec.outer_axes)
        for momentum in bucket.outer[1:]:
            share = momentum.range if bucket.is_primary and not axes.replica else _NOTHING
            yield SavedState(bucket, OUTER_MOMENTUM, momentum, share, along, _zeroing(momentum))
    for bucket in trainable:
        axes = bucket.axes
        for residual in bucket.gradient.residuals:
            kind, split, apart = residual.spec
            along = tuple(axis for axis in axes.summed_over if axis not in (*split, *apart))
            share = bucket.space.range((*split, *along)) if bucket.is_primary else _NOTHING
            yield SavedState(bucket, kind, residual.committed, share, axes.live(along), residual.clear, residual)


def copied_along(bucket: Bucket) -> tuple[str, ...]:
    """The axes with more than one rank along which ranks hold the same weights and moments of a bucket."""
    axes = bucket.axes
    return axes.live(axis for axis in axes.summed_over if axis not in bucket.spec.optim_axes)


def share_in_replica(bucket: Bucket) -> Range:
    """Range that this rank saves of its replica's own states: ranks that hold the same save a part each."""
    split = bucket.spec.optim_axes
    every = (*split, *(axis for axis in bucket.axes.summed_over if axis not in split))
    return bucket.space.range(every) if bucket.is_primary else _NOTHING


def _share(bucket: Bucket) -> Range:
    """Range that this rank saves of states that are the same in all replicas: the first one saves them."""
    return share_in_replica(bucket) if not bucket.axes.replica else _NOTHING


def _zeroing(state: Resting) -> Callable[[], None]:
    def zero() -> None:
        with state.opened(state.range, "replace") as data:
            data.zero_()

    return zero
