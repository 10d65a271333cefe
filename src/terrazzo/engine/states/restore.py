"""Sets a sharded model's and optimizer's state from whatever can be asked for ranges of it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine.buckets.gradients.residual import Residual
from terrazzo.engine.buckets.resting.buffer import Buffer, Resting
from terrazzo.engine.optim.driver import OptimizerDriver
from terrazzo.engine.optim.segments.segment import Segment
from terrazzo.engine.optim.stock.template import Template
from terrazzo.engine.plan.error_feedback import RESIDUAL, RESIDUAL_OF_SUMS
from terrazzo.engine.plan.kinds import numbered
from terrazzo.engine.plan.layout import Range, Slot
from terrazzo.engine.plan.partition import Member
from terrazzo.engine.states.saved_states import SavedState

__all__ = ["Read", "reading", "restore_optimizer", "restore_state"]

Read = Callable[[str, str, int, int], Tensor | None]
"""(name, kind, start, stop) to `stop - start` elements as a 1-D tensor, or None where the state is absent.

Of a state per element they are elements of what this rank has of the parameter, flat.

No elements at all, `start == stop`, asks whether the state is there: nothing may be read for the answer.
"""


def reading(states: Mapping[str, Mapping[str, Any]]) -> Read:
    """A `Read` of full optimizer states, by parameter name and kind."""

    def read(name: str, kind: str, start: int, stop: int) -> Tensor | None:
        value = states.get(name, {}).get(kind)
        return None if value is None else torch.as_tensor(value).detach().reshape(-1)[start:stop]

    return read


def restore_state(saved: SavedState, read: Read) -> None:
    """Set what this rank holds of one state of a bucket; a parameter that `read` does not have keeps what is there."""
    saved.before_restoring()
    for slot, member in zip(saved.bucket.slots, saved.bucket.members, strict=True):
        own = read if saved.residual is None else _read_residual(saved, saved.residual, slot, member, read)
        _restore(saved.state, slot, saved.kind, saved.state.range, own)


def _read_residual(saved: SavedState, residual: Residual, slot: Slot, member: Member, read: Read) -> Read:
    """What this rank takes over of residuals, so that those of all ranks together are what they were.

    Of m ranks that have one of their own of a parameter, number r takes over the numbers r, r + m, r + 2m and so on,
    added in that order in fp32; where no sums are encoded here, those of sums likewise.
    """
    if (own := residual.number_of(member.replicated)) is None:
        return _sum_of(read, [])
    kinds = [saved.kind] if len(saved.bucket.gradient.residuals) > 1 else [RESIDUAL, RESIDUAL_OF_SUMS]
    return _sum_of(read, [taken for kind in kinds for taken in _numbered(read, slot.name, kind, *own)])


def _numbered(read: Read, name: str, kind: str, own: int, count: int) -> list[str]:
    """The kinds of a parameter's states that the rank of that number, of so many, takes over."""
    numbers = itertools.takewhile(lambda n: read(name, numbered(kind, n), 0, 0) is not None, itertools.count())
    return [numbered(kind, number) for number in numbers if number % count == own]


def _sum_of(read: Read, kinds: Sequence[str]) -> Read:
    """The sum of several states of one parameter."""

    def total(name: str, kind: str, start: int, stop: int) -> Tensor | None:
        parts = [part.float() for each in kinds if (part := read(name, each, start, stop)) is not None]
        return functools.reduce(torch.add, parts) if parts else None

    return total


def _of_replica(read: Read, driver: OptimizerDriver) -> Read:
    """What a replica that trains by itself reads: states of its own, or those of the first where it was not there.

    A parameter that had no gradients in a replica has no state there, whatever the others have.
    """
    replica = driver.sharding.axes.replica
    names = [slot.name for bucket in driver.buckets for slot in bucket.slots]
    kinds = {numbered(kind, replica) for segment in driver.segments for kind in segment.template}
    if not replica or all(read(name, kind, 0, 0) is None for name in names for kind in kinds):
        return read
    return lambda name, kind, start, stop: read(name, numbered(kind, replica), start, stop)


def restore_optimizer(driver: OptimizerDriver, read: Read) -> None:
    """Set the optimizer's state; parameters for which `read` has none go back to having none."""
    read = _of_replica(read, driver)
    optimizer, parts = driver.optimizer, []
    earlier = {segment.parameter: optimizer.state.pop(segment.parameter, {}) for segment in driver.segments}
    for segment in driver.segments:
        labels = [_label(_read_fixed(slot, segment.template, read)) for slot in _slots(segment)]
        parts.append(segment.cut(labels, optimizer))
    driver.groups.recut(parts)
    for segment in driver.segments:
        fixed = _read_fixed(_slots(segment)[0], segment.template, read, segment.device)
        if fixed is not None:
            before = earlier.get(segment.parameter, {})
            per_element = segment.template.per_element
            moments = {kind: _read_moments(segment, kind, read, before.get(kind)) for kind in per_element}
            optimizer.state[segment.parameter] = {kind: (fixed | moments)[kind] for kind in segment.template}


def _restore(state: Resting, slot: Slot, kind: str, within: Range, read: Read) -> None:
    """Set what `state` holds of one parameter inside `within`."""
    for part in state.cuts(slot.range.intersect(within)):
        own = slot.own(part)
        value = read(slot.name, kind, own.start, own.stop)
        if value is not None:
            with state.opened(part, "change") as data:
                data.copy_(value)


def _read_moments(segment: Segment, kind: str, read: Read, before: Any) -> Tensor:
    """A state per element, in the memory of the one `before` it where that fits: fresh memory would cost its pages."""
    dtype = segment.bucket.precision.shown_moments
    if kind in segment.bucket.moments:
        return _read_off_device(segment, kind, read)
    if isinstance(before, Tensor) and (before.shape, before.dtype) == (segment.parameter.shape, dtype):
        whole = before.zero_()
    else:
        whole = torch.zeros_like(segment.parameter, dtype=dtype, requires_grad=False)
    for slot, own_range in segment.slots():
        own = slot.own(own_range)
        value = read(slot.name, kind, own.start, own.stop)
        if value is not None:
            whole[own_range.within(segment.range)].copy_(value)
    return whole


def _read_off_device(segment: Segment, kind: str, read: Read) -> Tensor:
    """A state per element of a segment that is updated away from the device; for one in files, its placeholder."""
    state = segment.bucket.moments[kind]
    for part in state.cuts(segment.range):
        with state.opened(part, "change") as data:
            data.zero_()
    for slot, own in segment.slots():
        _restore(state, slot, kind, own, read)
    if (placeholder := segment.state_placeholder(kind)) is not None:
        return placeholder
    assert isinstance(state, Buffer), "what is in files has a placeholder"
    return state.part(segment.range)


def _read_fixed(
    slot: Slot, template: Template, read: Read, device: torch.device | None = None
) -> dict[str, Any] | None:
    """The states of a parameter that are not per element, on `device` if given; None when it has no state at all."""
    fixed: dict[str, Any] = {}
    for kind, spec in template.items():
        if spec.per_element:
            if slot.numel and read(slot.name, kind, 0, 0) is None:
                return None
            continue
        value = read(slot.name, kind, 0, math.prod(spec.shape))
        if value is None:
            return None
        fixed[kind] = spec.restored(value, device)
    return fixed


def _label(fixed: Mapping[str, Any] | None) -> Hashable:
    """A value that is equal for parameters whose states can share one tensor."""
    return None if fixed is None else tuple((key, str(torch.as_tensor(v).tolist())) for key, v in fixed.items())


def _slots(segment: Segment) -> tuple[Slot, ...]:
    return tuple(segment.bucket.slots[segment.first : segment.last])
