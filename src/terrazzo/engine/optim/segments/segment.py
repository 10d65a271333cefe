"""What a stock optimizer sees: flat runs of master weights.

A `Segment` is this rank's part of consecutive parameters that share a bucket and a param group, as one 1-D tensor. It
stays whole while its parameters all get gradients, or none does. When some do not, it is cut for good at that
boundary, state included, so that the optimizer can leave exactly those alone as it would in a single process.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.gradients.summed import SummedGradient
from terrazzo.engine.buckets.resting.buffer import Buffer
from terrazzo.engine.optim.segments.group_runs import held_range, runs
from terrazzo.engine.optim.segments.state_placeholder import StateIn8Bits, StateOnNvme, StatePlaceholder
from terrazzo.engine.optim.stock.template import Template
from terrazzo.engine.plan.layout import Range, Slot

__all__ = ["Segment", "give_gradient", "handed_over", "segments_of"]


@dataclass(eq=False)
class Segment:
    """This rank's part of `bucket.members[start:stop]` within `window`; never empty.

    Attributes:
        window: of the bucket's flat space; on `nvme` a cell, which is read, updated and written as one.
        parameter: the elements, a view into the master weights; on `nvme` a stand-in without memory, on `meta`, and so
            are the states that the optimizer keeps for each of its elements; so are those in 8 bits on any tier.
        template: what the optimizer keeps for a parameter of its group, as far as that is known.
    """

    bucket: Bucket
    start: int
    stop: int
    window: Range
    parameter: nn.Parameter
    template: Template

    @property
    def group(self) -> int:
        """Number of its param group among those of all optimizers of the model."""
        return self.bucket.members[self.start].group

    @property
    def range(self) -> Range:
        """The segment in the bucket's flat space, cut to what this rank holds."""
        return held_range(self.bucket, self.start, self.stop).intersect(self.window)

    def slots(self) -> Iterator[tuple[Slot, Range]]:
        """Each parameter of which this rank holds a part, with that part's range in the flat space."""
        for slot in self.bucket.slots[self.start : self.stop]:
            own = self.bucket.master.range.intersect(self.window).intersect(slot.range)
            if own.numel:
                yield slot, own

    @property
    def due(self) -> bool:
        """Whether there is a finished gradient for it on any rank."""
        return self.bucket.gradient.finished.exists and self.seen[0]

    def gradient(self, finished: SummedGradient) -> Tensor:
        """This rank's part of the finished gradient, scaled, in `grad_dtype`."""
        with finished.wait().opened(self.range) as part:
            return finished.scaled(part).to(device=self.device, dtype=self.grad_dtype)

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of gradients in a step: the master's, but where that keeps a remainder the one they are summed in."""
        spec = self.bucket.spec
        return spec.precision.accumulate if spec.has_remainder else self.parameter.dtype

    def take_gradient(self, finished: Mapping[Bucket, SummedGradient]) -> None:
        """Have `parameter.grad`, where there is a gradient, from those of its buckets that are `finished`."""
        if self.due:
            give_gradient(self.parameter, self.gradient(finished[self.bucket]))

    @property
    def device(self) -> torch.device:
        """The device that it is updated on."""
        return self.parameter.device if self.parameter.device.type != "meta" else torch.device("cpu")

    def keeps_per_element(self, key: str, value: Any) -> bool:
        """Whether the optimizer keeps `value` for each element; where nobody has seen the key before, by its shape."""
        return self.template.keeps_per_element(key, value, self.parameter.shape)

    def state_placeholder(self, key: str) -> StatePlaceholder | None:
        """The stand-in that `optimizer.state` has for a state of the bucket; None where it has the state itself."""
        precision, numel = self.bucket.spec.precision, self.range.numel
        if precision.narrow is not None:
            return StateIn8Bits.of(numel, precision.shown_moments, key)
        return StateOnNvme.of(numel, precision.shown_moments, key) if self.parameter.is_meta else None

    def take_over_states(self, state: Mapping[str, Any]) -> None:
        """Copy what a user has put in the place of states away from the device to where those rest.

        Args:
            state: `optimizer.state` of this segment; no update of it may be under way.
        """
        for key, at_rest in self.bucket.moments.items():
            value = state.get(key)
            if isinstance(value, Tensor) and not isinstance(value, StatePlaceholder):
                with at_rest.opened(self.range, "change") as data:
                    if data.data_ptr() != value.data_ptr():
                        data.copy_(value.detach())

    def cut(self, labels: Sequence[Hashable], optimizer: Optimizer) -> list[Segment]:
        """Split between members whose labels differ, optimizer state included.

        Args:
            labels: one for each of its members.
        """
        if len(set(labels)) <= 1:
            return [self]
        state = optimizer.state.pop(self.parameter, None)
        pieces, start = [], self.start
        for _, equal in itertools.groupby(labels):
            stop = start + len(list(equal))
            pieces += _segment(self.bucket, start, stop, self.window, self.template)
            start = stop
        for piece in pieces if state else ():
            part = piece.range.within(self.range)
            optimizer.state[piece.parameter] = {key: self._cut_state(key, value, part) for key, value in state.items()}
        return pieces

    @property
    def seen(self) -> list[bool]:
        """Whether any rank had a gradient for it, for each member."""
        return self.bucket.gradient.seen[self.start : self.stop]

    def _cut_state(self, key: str, value: Any, part: slice) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, StatePlaceholder):
            return type(value).of(part.stop - part.start, value.dtype, key)
        return value[part] if self.keeps_per_element(key, value) else value.clone()


def segments_of(buckets: Iterable[Bucket], templates: Mapping[int, Template]) -> list[Segment]:
    """One segment per run of parameters with the same param group; on `nvme`, per run within a cell.

    Args:
        templates: of the param groups that are asked for, by their numbers.
    """
    return [
        segment
        for bucket in buckets
        for window in bucket.master.cuts(bucket.master.range)
        for start, stop in runs(bucket)
        if (group := bucket.members[start].group) in templates
        for segment in _segment(bucket, start, stop, window, templates[group])
    ]


def give_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Have `parameter.grad` be `gradient`, whatever its dtype."""
    if gradient is not None and gradient.dtype != parameter.dtype:
        parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def handed_over(due: Sequence[Segment]) -> dict[Bucket, SummedGradient]:
    """The finished gradients of these segments, for an update of all of them."""
    buckets = {segment.bucket: None for segment in due}
    return {b: b.gradient.handed_over([each.range for each in due if each.bucket is b]) for b in buckets}


def _segment(bucket: Bucket, start: int, stop: int, window: Range, template: Template) -> list[Segment]:
    """Empty where this rank holds nothing of it; members that lie outside the window are left out."""
    within = [index for index in range(start, stop) if held_range(bucket, index, index + 1).intersect(window).numel]
    if not within:
        return []
    start, stop = within[0], within[-1] + 1
    own, master = held_range(bucket, start, stop).intersect(window), bucket.master
    if isinstance(master, Buffer):
        parameter = nn.Parameter(master.part(own))
    else:
        parameter = nn.Parameter(torch.empty(own.numel, dtype=master.dtype, device="meta"))
    return [Segment(bucket, start, stop, window, parameter, template)]
