"""Restoring: a sharded model's and optimizer's state is set from whatever can be asked for ranges of it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from terrazzo.engine.buckets.gradients.residual import Residual
from terrazzo.engine.buckets.resting.buffer import Buffer, Resting
from terrazzo.engine.optim.driver import OptimizerDriver
from terrazzo.engine.optim.segments.segment import Segment
from terrazzo.engine.optim.stock.template import Template
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.plan.error_feedback import RESIDUAL, RESIDUAL_OF_SUMS
from terrazzo.engine.plan.layout import Range, Slot
from terrazzo.engine.states.saved_states import SavedState
from terrazzo.engine.states.state_names import numbered

__all__ = ["FullStates", "StateReader", "restore_optimizer", "restore_state"]


class StateReader(Protocol):
    """Source of states to restore. Each is asked for by the name of its parameter and by its kind."""

    def has(self, name: str, kind: str) -> bool:
        """Return whether the state is there. Nothing of it needs to be read for that."""

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return the elements `start` to `stop` of a state that is there, as a 1-D tensor.

        Of a state per element they are elements of what this rank has of the parameter, flat.
        """


class FullStates:
    """A `StateReader` of tensors in memory, each of which is all that this rank has of its parameter.

    Args:
        states: by name of the parameter and by kind; None where a state is absent.
    """

    def __init__(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        self._states = states

    def has(self, name: str, kind: str) -> bool:
        return self._states.get(name, {}).get(kind) is not None

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        return torch.as_tensor(self._states[name][kind]).detach().reshape(-1)[start:stop]


@dataclass(frozen=True)
class _SummedStates:
    """A `StateReader` of the sum of several states of one parameter, whichever kind is asked for.

    Attributes:
        kinds: of the states, all of which `source` has; without any there is no sum.
    """

    source: StateReader
    kinds: Sequence[str]

    def has(self, name: str, kind: str) -> bool:
        return bool(self.kinds)

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        parts = [self.source.read(name, each, start, stop).float() for each in self.kinds]
        return functools.reduce(torch.add, parts)


@dataclass(frozen=True)
class _StatesOfReplica:
    """A `StateReader` of the states that one of several replicas has of its own."""

    source: StateReader
    replica: int

    def has(self, name: str, kind: str) -> bool:
        return self.source.has(name, numbered(kind, self.replica))

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        return self.source.read(name, numbered(kind, self.replica), start, stop)


# -- what is saved of each bucket ----------------------------------------------------------------------------------


def restore_state(saved: SavedState, source: StateReader) -> None:
    """Set what this rank holds of one state of a bucket; where `source` lacks a parameter, what
    `SavedState.before_restoring` leaves of it stays: its weights, but zeros for momentum and residuals.
    """
    saved.before_restoring()
    for slot, member in zip(saved.bucket.slots, saved.bucket.members, strict=True):
        residual = saved.residual
        own = source if residual is None else _residuals_taken_over(saved, residual, slot, member, source)
        _restore(saved.state, slot, saved.kind, saved.state.range, own)


def _residuals_taken_over(
    saved: SavedState, residual: Residual, slot: Slot, member: Member, source: StateReader
) -> StateReader:
    """Return the residuals that this rank takes over, so that those of all ranks together are what they were.

    Of m ranks that have one of their own of a parameter, number r takes over the numbers r, r + m, r + 2m and so on,
    added in that order in fp32; where no sums are encoded here, those of sums likewise.
    """
    if (own := saved.bucket.counted.residual_number(residual.spec, member)) is None:
        return _SummedStates(source, [])
    kinds = [saved.kind] if len(saved.bucket.gradient.residuals) > 1 else [RESIDUAL, RESIDUAL_OF_SUMS]
    return _SummedStates(source, [taken for kind in kinds for taken in _numbered(source, slot.name, kind, *own)])


def _numbered(source: StateReader, name: str, kind: str, own: int, count: int) -> list[str]:
    """Kinds of a parameter's states that the rank of number `own`, of `count`, takes over."""
    numbers = itertools.takewhile(lambda number: source.has(name, numbered(kind, number)), itertools.count())
    return [numbered(kind, number) for number in numbers if number % count == own]


# -- an optimizer's states -----------------------------------------------------------------------------------------


def restore_optimizer(driver: OptimizerDriver, source: StateReader) -> None:
    """Set the optimizer's state; parameters of which `source` has none go back to having none."""
    source = _of_replica(source, driver)
    optimizer, parts = driver.optimizer, []
    earlier = {segment.parameter: optimizer.state.pop(segment.parameter, {}) for segment in driver.segments}
    for segment in driver.segments:
        labels = [_label(_read_fixed(slot, segment.template, source)) for slot in _slots(segment)]
        parts.append(segment.cut(labels, optimizer))
    driver.groups.recut(parts)
    for segment in driver.segments:
        fixed = _read_fixed(_slots(segment)[0], segment.template, source, segment.device)
        if fixed is not None:
            before = earlier.get(segment.parameter, {})
            per_element = segment.template.per_element
            moments = {kind: _read_moments(segment, kind, source, before.get(kind)) for kind in per_element}
            optimizer.state[segment.parameter] = {kind: (fixed | moments)[kind] for kind in segment.template}


def _of_replica(source: StateReader, driver: OptimizerDriver) -> StateReader:
    """Return what a replica that trains by itself restores: its own states, or the first's where it was not there.

    A parameter that had no gradients in a replica has no state there, whatever the others have.
    """
    replica = driver.sharding.axes.replica
    names = [slot.name for bucket in driver.buckets for slot in bucket.slots]
    kinds = {numbered(kind, replica) for segment in driver.segments for kind in segment.template}
    if not replica or not any(source.has(name, kind) for name in names for kind in kinds):
        return source
    return _StatesOfReplica(source, replica)


def _restore(state: Resting, slot: Slot, kind: str, wanted: Range, source: StateReader) -> None:
    """Set what `state` holds of one parameter inside `wanted`, if `source` has it."""
    if not source.has(slot.name, kind):
        return
    for part in state.cuts(slot.range.intersect(wanted)):
        own = slot.own(part)
        value = source.read(slot.name, kind, own.start, own.stop)
        with state.opened(part, "change") as data:
            data.copy_(value)


def _read_moments(segment: Segment, kind: str, source: StateReader, before: Any) -> Tensor:
    """A state per element, in the memory of the one `before` it where that fits: fresh memory would cost its pages."""
    dtype = segment.bucket.spec.precision.shown_moments
    if kind in segment.bucket.moments:
        return _read_off_device(segment, kind, source)
    if isinstance(before, Tensor) and (before.shape, before.dtype) == (segment.parameter.shape, dtype):
        whole = before.zero_()
    else:
        whole = torch.zeros_like(segment.parameter, dtype=dtype, requires_grad=False)
    for slot, own_range in segment.slots():
        if source.has(slot.name, kind):
            own = slot.own(own_range)
            whole[own_range.within(segment.range)].copy_(source.read(slot.name, kind, own.start, own.stop))
    return whole


def _read_off_device(segment: Segment, kind: str, source: StateReader) -> Tensor:
    """A state per element of a segment that is updated away from the device; for one in files, its placeholder."""
    state = segment.bucket.moments[kind]
    for part in state.cuts(segment.range):
        with state.opened(part, "change") as data:
            data.zero_()
    for slot, own in segment.slots():
        _restore(state, slot, kind, own, source)
    if (placeholder := segment.state_placeholder(kind)) is not None:
        return placeholder
    assert isinstance(state, Buffer), "what is in files has a placeholder"
    return state.part(segment.range)


def _read_fixed(
    slot: Slot, template: Template, source: StateReader, device: torch.device | None = None
) -> dict[str, Any] | None:
    """The states of a parameter that are not per element, on `device` if given; None when it has no state at all."""
    fixed: dict[str, Any] = {}
    for kind, spec in template.items():
        if spec.per_element and not slot.numel:
            continue  # nobody has any element of it
        if not source.has(slot.name, kind):
            return None
        if not spec.per_element:
            fixed[kind] = spec.restored(source.read(slot.name, kind, 0, math.prod(spec.shape)), device)
    return fixed


def _label(fixed: Mapping[str, Any] | None) -> Hashable:
    """A value that is equal for parameters whose states can share one tensor."""
    return None if fixed is None else tuple((key, str(torch.as_tensor(v).tolist())) for key, v in fixed.items())


def _slots(segment: Segment) -> tuple[Slot, ...]:
    return tuple(segment.bucket.slots[segment.start : segment.stop])
