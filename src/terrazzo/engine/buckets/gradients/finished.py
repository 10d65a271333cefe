"""A bucket's gradient, summed over all ranks and divided: for clipping, for users and for a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from terrazzo.engine.buckets.gradients.summed import SummedGradient
from terrazzo.engine.buckets.resting.buffer import Buffer, Resting, Space, StateStore
from terrazzo.engine.buckets.resting.counted_once import CountedOnce
from terrazzo.engine.comm.sums import multiply
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.layout import Range

__all__ = ["FinishedGradient"]


class FinishedGradient:
    """The finished gradient of a bucket, if there is one.

    Attributes:
        sum: the gradient, which may still be on its way to its tier; None where there is none.
        changes: how often the gradient has changed.
    """

    def __init__(self, space: Space, spec: BucketSpec, counted: CountedOnce, store: StateStore) -> None:
        self.space, self._spec, self._counted, self._store = space, spec, counted, store
        self._at_rest = self._place(store)
        self.sum: SummedGradient | None = None
        self.changes = 0
        self._finite_before: list[Tensor] = []  # of parts that have been changed since

    def _place(self, store: StateStore) -> Resting | None:
        """Place for finished gradients; None on the device, where each is a tensor of its own, and for none."""
        spec, tier = self._spec, self._spec.tiers.grad
        if tier == "device" or not spec.trainable:
            return None
        return store.state(self.space, spec.optim_axes, spec.precision.accumulate, tier)

    @property
    def exists(self) -> bool:
        """Whether there is one."""
        return self.sum is not None

    def land(self, data: Buffer) -> None:
        """Bring a finished gradient to its tier, or add it to the one that rests there."""
        earlier = self.sum
        self.changes += 1
        if earlier is not None:
            earlier.apply_factor()
            resting = earlier.wait()
            for part in resting.cuts(resting.range):
                with resting.opened(part, "change") as sums:
                    sums.add_(data.part(part).to(sums.device))
        elif self._at_rest is None:
            self.sum = SummedGradient(data)
        else:
            self.sum = SummedGradient(self._at_rest, self._store.save(self._at_rest, data))

    def handed_over(self, stepped: Sequence[Range], seen: Iterable[Range]) -> SummedGradient:
        """Return the gradient for an update, which waits until it has landed, and applies the clipping factor itself.

        Args:
            stepped: the ranges that the update uses.
            seen: the parameters that have gradients. Where the update leaves some of them out, later micro-batches may
                add to these: then the factor is applied to all now.
        """
        assert self.sum is not None, "no gradient is finished"
        if self.sum.factor is not None and not self._all_in(stepped, seen):
            self.sum.apply_factor()
        handed_over = replace(self.sum)
        if isinstance(self.sum.data, Buffer):
            self.sum.factor = None
        return handed_over

    def _all_in(self, ranges: Sequence[Range], seen: Iterable[Range]) -> bool:
        """Whether `ranges` hold all that this rank steps of `seen`."""
        own = self.space.range(self._spec.optim_axes)
        parts = [own.intersect(each) for each in seen]
        return all(sum(part.intersect(each).numel for each in ranges) == part.numel for part in parts)

    def scale(self, factor: Tensor) -> None:
        """Multiply the finished gradient; one that rests away from the device is multiplied when it is used."""
        finished = self.sum
        self.changes += 1
        if finished is None:
            return
        if self._at_rest is None:
            finished.change(lambda data: multiply(data, factor))
            return
        finished.put_off(factor)

    def read(self, index: int | None = None) -> Tensor | None:
        """Return this rank's part of the finished gradient in memory, 1-D and scaled; None where there is none.

        Args:
            index: this rank's elements of that parameter alone; None where it has none.
        """
        return self._read(self._range_of(index))

    def contribution(self, index: int | None = None) -> Tensor | None:
        """Return the elements that this rank gives to sums over ranks; see `CountedOnce.in_sums`. Else as `read`."""
        return self._read(self._range_of(index).intersect(self._counted.in_sums))

    def _range_of(self, index: int | None) -> Range:
        return self.space.layout.whole if index is None else self.space.layout.slots[index].range

    def _read(self, wanted: Range) -> Tensor | None:
        """Return what this rank has of `wanted`, scaled; None for nothing."""
        finished = self.sum
        if finished is None:
            return None
        resting = finished.wait()
        part = resting.range.intersect(wanted)
        if not part.numel:
            return None
        with resting.opened(part) as data:
            return data if finished.factor is None else finished.scaled(data.clone())

    def is_finite(self) -> Tensor | None:
        """Whether every element is finite, and was where `note_finite` was called: a 0-d bool tensor where the
        gradient rests; None where there is none.
        """
        if self.sum is None:
            return None
        resting = self.sum.wait()
        with resting.opened(resting.range) as data:
            return functools.reduce(torch.Tensor.logical_and, self._finite_before, torch.isfinite(data).all())

    def note_finite(self, index: int) -> None:
        """One parameter's gradient is about to be changed in a way that may hide an overflow of fp16."""
        if self._spec.precision.loss_scaling is not None and (own := self.read(index)) is not None:
            self._finite_before.append(torch.isfinite(own).all())

    def change(self, index: int, change: Callable[[Tensor], object]) -> None:
        """Change this rank's elements of one parameter's finished gradient in memory."""
        self.changes += 1
        if self.sum is not None:
            self.sum.apply_factor()
            self.sum.change(change, self.space.layout.slots[index].range)

    def expect_changes(self) -> None:
        """Note that an optimizer gets the gradient, and may change it in place."""
        self.changes += 1

    def forget(self) -> None:
        """Forget the gradient."""
        self.changes += 1
        self.sum = None
        self._finite_before.clear()

    def zero(self) -> None:
        """Set the gradient to zero; an optimizer still steps on it."""
        self.changes += 1
        self._finite_before.clear()
        if self.sum is not None:
            self.sum.factor = None  # it would meet the next gradient, and 0 times NaN is NaN
            self.sum.change(Tensor.zero_)
