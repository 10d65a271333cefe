"""A bucket's gradient once it has been summed over all ranks and divided: for clipping, for users and for a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from terrazzo.engine.buckets.buffer import Buffer, Homes, Resting, Space
from terrazzo.engine.buckets.summed import SummedGradient
from terrazzo.engine.links.sums import multiply
from terrazzo.engine.plan.layout import Range
from terrazzo.engine.plan.sharding import ShardingSpec
from terrazzo.engine.plan.spec import Sums

__all__ = ["FinishedGradient"]


class FinishedGradient:
    """What can be done with it, and with none.

    Args:
        sums: how it is summed over ranks.
        tier: where it rests.

    Attributes:
        seen: for each parameter, whether it has got a gradient since the last `zero`; on any rank, once they agreed.
        finished: if there is a finished gradient, be it still on its way to its tier.
        changes: counts those of the finished gradient.
    """

    _store: Homes  # from `build` on
    _home: Resting | None  # None on the device: each finished gradient is a tensor of its own

    def __init__(self, space: Space, sharding: ShardingSpec, sums: Sums, tier: str) -> None:
        self.space, self.sharding, self.sums, self.tier = space, sharding, sums, tier
        self.seen = [False] * len(space.layout.slots)
        self.finished: SummedGradient | None = None
        self.changes = 0

    def build(self, store: Homes) -> None:
        """Allocate what lies elsewhere than on the device."""
        self._store = store
        dtype = self.sharding.precision.accumulate
        self._home = None if self.tier == "device" else store.state(self.space, self.sums.last.axes, dtype, self.tier)

    def land(self, data: Buffer) -> None:
        """Bring a finished gradient to its tier, or add it to the one that is there."""
        there = self.finished
        self.changes += 1
        if there is not None:
            there.apply_factor()
            resting = there.wait()
            for part in resting.cuts(resting.range):
                with resting.opened(part, "change") as sums:
                    sums.add_(data.part(part).to(sums.device))
        elif self._home is None:
            self.finished = SummedGradient(data)
        else:
            self.finished = SummedGradient(self._home, self._store.commit(self._home, data))

    def handed_over(self, stepped: Sequence[Range]) -> SummedGradient:
        """The finished gradient for an update, which waits for it, and scales in place what it finds in memory.

        Args:
            stepped: what the update uses. If other parameters have gradients too, which later micro-batches may add
                to, all are scaled now.
        """
        assert self.finished is not None, "no gradient is finished"
        if self.finished.factor is not None and not self._all_in(stepped):
            self.finished.apply_factor()
        handed_over = replace(self.finished)
        if isinstance(self.finished.data, Buffer):
            self.finished.factor = None
        return handed_over

    def _all_in(self, ranges: Sequence[Range]) -> bool:
        """Whether `ranges` hold all that this rank steps of parameters that have gradients."""
        own = self.space.range(self.sharding.plan.optim.axes)
        parts = [
            own.intersect(slot.range) for slot, seen in zip(self.space.layout.slots, self.seen, strict=True) if seen
        ]
        return all(sum(part.intersect(each).numel for each in ranges) == part.numel for part in parts)

    def scale(self, factor: Tensor) -> None:
        """Multiply the finished gradient; away from the device, once it is used."""
        finished = self.finished
        self.changes += 1
        if finished is None:
            return
        if self._home is None:
            finished.change(lambda data: multiply(data, factor))
            return
        finished.apply_factor()
        finished.factor = factor  # on the device: who uses it waits, not the host

    def whole(self, index: int | None = None) -> Tensor | None:
        """The finished gradient as one tensor in memory, scaled; None where there is none.

        Args:
            index: this rank's elements of that parameter alone; None where it has none.
        """
        return self._read(self._range_of(index))

    def contribution(self, index: int | None = None) -> Tensor | None:
        """What this rank gives of it to sums over the axes of `ShardingSpec.contributed_over`.

        Each element is given by one rank of these, however many hold it. Arguments as of `whole`.
        """
        axes, optim = self.sharding.axes, self.sums.last.axes
        rest = axes.names if axes.has_experts else axes.summed_beside
        own = self.space.range((*optim, *(axis for axis in rest if axis not in optim)))
        return self._read(self._range_of(index).intersect(own))

    def _range_of(self, index: int | None) -> Range:
        return self.space.layout.whole if index is None else self.space.layout.slots[index].range

    def _read(self, wanted: Range) -> Tensor | None:
        """What this rank has of `wanted`, scaled; None for nothing."""
        finished = self.finished
        if finished is None:
            return None
        resting = finished.wait()
        held = resting.range.intersect(wanted)
        if not held.numel:
            return None
        with resting.opened(held) as data:
            return data if finished.factor is None else finished.scaled(data.clone())

    def is_finite(self) -> Tensor | None:
        """Whether every element is, 0-d bool where it rests, scaled or not; None without a finished gradient."""
        if self.finished is None:
            return None
        resting = self.finished.wait()
        with resting.opened(resting.range) as data:
            return torch.isfinite(data).all()

    def change(self, index: int, change: Callable[[Tensor], object]) -> None:
        """Change this rank's elements of one parameter's finished gradient in memory."""
        self.changes += 1
        if self.finished is not None:
            self.finished.apply_factor()
            self.finished.change(change, self.space.layout.slots[index].range)
