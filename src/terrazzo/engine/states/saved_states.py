"""States of each bucket in checkpoints beside an optimizer's: where they are, and which ranks hold the same of them.

A further state is a line of `saved_states`. Saving (`pieces`), comparing copies, and restoring (`restore`) walk these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.gradients.residual import Residual
from terrazzo.engine.buckets.resting.buffer import Buffer, Resting
from terrazzo.engine.buckets.resting.counted_once import NOTHING
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.plan.diloco import OUTER_MOMENTUM
from terrazzo.engine.plan.layout import Range
from terrazzo.engine.runtime.calls import do_nothing
from terrazzo.engine.states.state_names import numbered

__all__ = ["SavedState", "copied_along", "saved_states", "saved_weights", "share_in_replica"]


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
        number = self.bucket.counted.residual_number(self.residual.spec, member)
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
        axes, split = bucket.axes, bucket.spec.outer_axes
        along = (*bucket.spec.copied_along(split), *axes.live(axes.replica_axis))
        for momentum in bucket.outer[1:]:
            share = _of_first_replica(bucket, bucket.counted.saved(split))
            yield SavedState(bucket, OUTER_MOMENTUM, momentum, share, along, _zeroing(momentum))
    for bucket in trainable:
        for residual in bucket.gradient.residuals:
            kind, *split_and_apart = residual.spec
            share, along = bucket.counted.saved(*split_and_apart), bucket.spec.copied_along(*split_and_apart)
            yield SavedState(bucket, kind, residual.committed, share, along, residual.clear, residual)


def copied_along(bucket: Bucket) -> tuple[str, ...]:
    """The axes along which ranks hold the same weights and moments of a bucket."""
    return bucket.spec.copied_along(bucket.spec.optim_axes)


def share_in_replica(bucket: Bucket) -> Range:
    """Range that this rank saves of its replica's own states."""
    return bucket.counted.saved(bucket.spec.optim_axes)


def _share(bucket: Bucket) -> Range:
    """Range that this rank saves of states that are the same in all replicas."""
    return _of_first_replica(bucket, share_in_replica(bucket))


def _of_first_replica(bucket: Bucket, share: Range) -> Range:
    return NOTHING if bucket.axes.replica else share


def _zeroing(state: Resting) -> Callable[[], None]:
    def zero() -> None:
        with state.opened(state.range, "replace") as data:
            data.zero_()

    return zero
