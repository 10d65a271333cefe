"""What a stock optimizer sees: flat runs of master weights.

A `Segment` is this rank's part of consecutive parameters that share a bucket and a param group, as one 1-D tensor. It
stays whole while its parameters all get gradients, or none does. When some do not, it is cut for good at that
boundary, state included, so that the optimizer can leave exactly those alone as it would in a single process.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.bucket import Bucket
from terrazzo.engine.layout import Range, Slot

__all__ = ["Segment", "held_range", "runs", "segments_of"]


@dataclass(eq=False)
class Segment:
    """Members `first` to `last` (exclusive) of a bucket; never empty on this rank."""

    bucket: Bucket
    first: int
    last: int
    parameter: nn.Parameter

    @property
    def group(self) -> int:
        return self.bucket.members[self.first].group

    @property
    def range(self) -> Range:
        """In the bucket's flat space, cut to what this rank holds."""
        return held_range(self.bucket, self.first, self.last)

    def slots(self) -> Iterator[tuple[Slot, Range]]:
        """Each parameter of which this rank holds a part, with that part's range in the flat space."""
        for slot in self.bucket.slots[self.first : self.last]:
            held = self.bucket.master.range.intersect(slot.range)
            if held.numel:
                yield slot, held

    def gradient(self) -> Tensor | None:
        """This rank's part of the finished gradient in the master's dtype, None where no rank had one."""
        if self.bucket.grad is None or not self.bucket.seen[self.first]:
            return None
        part = self.bucket.grad[self.range.within(self.bucket.master.range)]
        return part.to(self.parameter.dtype)

    def cut(self, labels: Sequence[Hashable], optimizer: Optimizer) -> list[Segment]:
        """Split between members whose labels differ, optimizer state included.

        Args:
            labels: one for each member from `first` to `last`.
        """
        if len(set(labels)) <= 1:
            return [self]
        state = optimizer.state.pop(self.parameter, None)
        pieces, start = [], self.first
        for _, equal in itertools.groupby(labels):
            stop = start + len(list(equal))
            pieces += _segment(self.bucket, start, stop)
            start = stop
        for piece in pieces if state else ():
            part = piece.range.within(self.range)
            optimizer.state[piece.parameter] = {key: self._cut_state(value, part) for key, value in state.items()}
        return pieces

    @property
    def seen(self) -> list[bool]:
        """For each member, whether any rank had a gradient for it."""
        return self.bucket.seen[self.first : self.last]

    def _cut_state(self, value: Any, part: slice) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value[part] if value.shape == self.parameter.shape else value.clone()


def segments_of(buckets: Iterable[Bucket]) -> list[Segment]:
    """One segment per run of parameters with the same param group."""
    return [segment for bucket in buckets for first, last in runs(bucket) for segment in _segment(bucket, first, last)]


def runs(bucket: Bucket) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) member of each run with one param group."""
    start = 0
    for _, members in itertools.groupby(bucket.members, key=lambda member: member.group):
        stop = start + len(list(members))
        yield start, stop
        start = stop


def _segment(bucket: Bucket, first: int, last: int) -> list[Segment]:
    held = held_range(bucket, first, last)
    return [Segment(bucket, first, last, nn.Parameter(bucket.master.part(held)))] if held.numel else []


def held_range(bucket: Bucket, first: int, last: int) -> Range:
    """What this rank holds of members `first` to `last` (exclusive), padding included."""
    run = Range(bucket.slots[first].offset, bucket.slots[last - 1].padded.stop)
    return bucket.space.range(bucket.optim_axes).intersect(run)
