"""A sharded model's and optimizer's state as named pieces, for whatever writes it down or reads it back.

A piece is a contiguous run of one parameter's elements, under the parameter's own name: nothing of the plan, the units
or the number of ranks remains in it, so pieces written under one plan can be restored under any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine.bucket import Bucket
from terrazzo.engine.buffer import Buffer, Resting
from terrazzo.engine.layout import Range, Slot
from terrazzo.engine.model.digest import digest
from terrazzo.engine.optim.optimizer import OptimizerDriver
from terrazzo.engine.optim.segment import Segment
from terrazzo.engine.optim.stock import StateSpec
from terrazzo.errors import BadInput

__all__ = [
    "ParameterInfo",
    "Piece",
    "Read",
    "average_pieces",
    "copied_pieces",
    "device_bytes",
    "fitting",
    "model_pieces",
    "name_in",
    "optimizer_pieces",
    "parameter_infos",
    "reading",
    "restore_averages",
    "restore_model",
    "restore_optimizer",
]

Read = Callable[[str, str, int, int], Tensor | None]
"""(name, kind, start, stop) to `stop - start` elements as a 1-D tensor, or None where the state is absent.

No elements at all, `start == stop`, asks whether the state is there: nothing may be read for the answer.
"""


def reading(states: Mapping[str, Mapping[str, Any]]) -> Read:
    """A `Read` of full optimizer states, by parameter name and kind."""

    def read(name: str, kind: str, start: int, stop: int) -> Tensor | None:
        value = states.get(name, {}).get(kind)
        return None if value is None else torch.as_tensor(value).detach().reshape(-1)[start:stop]

    return read


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of one state of one parameter.

    Attributes:
        name: the parameter's fully qualified name.
        kind: `weight`, `average`, or the optimizer's own key such as `exp_avg`; a state that is not per element, as
            `step` is, is given whole as [0, its number of elements).
        shape: the parameter's.
        numel: of the whole state.
        dtype: of the elements.
        read: gives them, 1-D: a view where they are in memory, a copy where they are in files.
    """

    name: str
    kind: str
    start: int
    stop: int
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    read: Callable[[], Tensor] = field(repr=False, compare=False)

    @property
    def tensor(self) -> Tensor:
        """The elements, 1-D, read now."""
        return self.read()

    def digest(self) -> int:
        """A checksum of the elements' bytes; equal ones have equal ones on every rank."""
        return int(digest(self.tensor))


@dataclass(frozen=True)
class ParameterInfo:
    """What there is to save of one parameter.

    Attributes:
        names: all that it has in the model, its own first.
        shape: the parameter's.
        dtype: of its weight, the master weight where there is one.
        group: number of its param group among those of all optimizers; -1 for none.
        states: of what an optimizer keeps for it by kind, the number of elements and their dtype, or None for the dtype
            of what is not per element. None where nothing steps it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int
    states: Mapping[str, tuple[int, torch.dtype | None]] | None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def parameter_infos(buckets: list[Bucket], templates: Sequence[Mapping[str, StateSpec]]) -> Iterator[ParameterInfo]:
    """Every parameter; see `restore_optimizer` for `templates`."""
    for bucket in buckets:
        dtype = bucket.master.dtype if bucket.trainable else bucket.weight.dtype
        for member, slot in zip(bucket.members, bucket.slots, strict=True):
            states: dict[str, tuple[int, torch.dtype | None]] | None = None
            if bucket.trainable and member.group >= 0:
                moments = bucket.precision.moments
                states = {
                    kind: (slot.numel, moments) if spec.per_element else (math.prod(spec.shape), None)
                    for kind, spec in templates[member.group].items()
                }
            yield ParameterInfo(slot.names, slot.shape, dtype, member.group, states)


def device_bytes(buckets: list[Bucket], drivers: Sequence[OptimizerDriver]) -> int:
    """Weights, master weights and optimizer state on the device, as they lie in memory."""
    held = [bucket.weight.nbytes for bucket in buckets if bucket.tiers.weight == "device"]
    held += [bucket.master.nbytes for bucket in buckets if bucket.has_own_master and not bucket.updated_apart]
    states = [
        driver.optimizer.state.get(segment.parameter, {})
        for driver in drivers
        for segment in driver.segments
        if not segment.bucket.updated_apart
    ]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return sum(held) + sum(tensor.nbytes for tensor in tensors)


def _copies(bucket: Bucket) -> Range:
    """All that this rank holds of a bucket's master weights and moments, whoever else holds it too."""
    return bucket.space.range(bucket.optim_axes)


def copied_pieces(
    buckets: list[Bucket], drivers: Sequence[OptimizerDriver]
) -> Iterator[tuple[tuple[str, ...], list[Piece]]]:
    """Mesh axes along which ranks hold the same, and all that this rank holds of the states of which that is true."""
    for trainable in (True, False):
        own = [bucket for bucket in buckets if bucket.trainable is trainable]
        if not own:
            continue
        axes, split = own[0].recipe.axes, own[0].optim_axes
        if along := axes.live(axis for axis in axes.names if axis not in split):
            pieces = list(model_pieces(own, _copies))
            for driver in drivers if trainable else ():
                pieces += optimizer_pieces(driver, _copies)
            yield along, pieces


def _own_share(bucket: Bucket) -> Range:
    """What this rank gives of the states it holds: replicas of one range give a part of it each."""
    axes = bucket.recipe.axes
    held = bucket.optim_axes
    return bucket.space.range((*held, *(axis for axis in axes.names if axis not in held)))


def model_pieces(buckets: list[Bucket], share: Callable[[Bucket], Range] = _own_share) -> Iterator[Piece]:
    """This rank's share of the weights, master weights where there are any; over all ranks each element comes once."""
    for bucket in buckets:
        state = bucket.master if bucket.trainable else bucket.weight
        for slot in bucket.slots:
            if (held := share(bucket).intersect(slot.range)).numel:
                yield _piece(slot, "weight", held, state)


def optimizer_pieces(driver: OptimizerDriver, share: Callable[[Bucket], Range] = _own_share) -> Iterator[Piece]:
    """This rank's share of the optimizer's state; what is not per element comes with a parameter's first element."""
    for segment in driver.segments:
        state = driver.optimizer.state.get(segment.parameter) or {}
        for slot, part in segment.slots():
            if not (held := share(segment.bucket).intersect(part)).numel:
                continue
            for kind, value in state.items():
                if isinstance(value, Tensor) and value.shape == segment.parameter.shape:
                    yield _moment(segment, slot, kind, held, value)
                elif held.start == slot.offset:
                    whole = torch.as_tensor(value).reshape(-1)
                    yield _whole(slot, kind, whole)


def name_in(state: Mapping[str, Tensor], slot: Slot) -> str | None:
    """Under which of its names a parameter is in `state`."""
    return next((name for name in slot.names if name in state), None)


def fitting(
    buckets: Sequence[Bucket], state: Mapping[str, Tensor], buffers: Mapping[str, tuple[int, ...]]
) -> list[tuple[Bucket, Slot, str]]:
    """The parameters that `state` has, and their names there.

    Args:
        buffers: shapes of those that it has, too.

    Raises:
        BadInput: tensors of the wrong shape; all are listed.
    """
    slots = [(bucket, slot, name_in(state, slot)) for bucket in buckets for slot in bucket.slots]
    found = [(bucket, slot, name) for bucket, slot, name in slots if name is not None]
    wanted = {name: slot.shape for _, slot, name in found} | dict(buffers)
    shapes = {name: tuple(state[name].shape) for name in wanted}
    wrong = [
        f"{name} is {shapes[name]} and should be {shape}" for name, shape in wanted.items() if shapes[name] != shape
    ]
    if wrong:
        raise BadInput(
            f"{len(wrong)} tensors have the wrong shape: {'; '.join(wrong)}. Give full tensors, from a model that "
            "was built as this one was."
        )
    return found


def average_pieces(averages: Mapping[Bucket, Buffer]) -> Iterator[Piece]:
    """This rank's share of the weights' moving averages."""
    for bucket, average in averages.items():
        for slot in bucket.slots:
            if (held := _own_share(bucket).intersect(slot.range)).numel:
                yield _piece(slot, "average", held, average)


def restore_averages(averages: Mapping[Bucket, Buffer], read: Read) -> None:
    """Set what `read` has of them."""
    for bucket, average in averages.items():
        for slot in bucket.slots:
            _restore(average, slot, "average", average.range, read)


def restore_model(buckets: list[Bucket], read: Read) -> None:
    """Set master weights, and weights that have none; a parameter that `read` does not have keeps its values.

    Weights that have a master follow from it when they are published: a rank reads what it has of the masters alone.
    """
    for bucket in buckets:
        state = bucket.master if bucket.trainable else bucket.weight
        for slot in bucket.slots:
            _restore(state, slot, "weight", state.range, read)


def _restore(state: Resting, slot: Slot, kind: str, within: Range, read: Read) -> None:
    """Set what `state` holds of one parameter inside `within`."""
    for part in state.cuts(slot.range.intersect(within)):
        value = read(slot.name, kind, part.start - slot.offset, part.stop - slot.offset)
        if value is not None:
            with state.opened(part, "change") as data:
                data.copy_(value)


def restore_optimizer(driver: OptimizerDriver, templates: Sequence[Mapping[str, StateSpec]], read: Read) -> None:
    """Set the optimizer's state; parameters for which `read` has none go back to having none.

    Args:
        templates: `state_of` each param group.
    """
    optimizer, parts = driver.optimizer, []
    held = {segment.parameter: optimizer.state.pop(segment.parameter, {}) for segment in driver.segments}
    for segment in driver.segments:
        labels = [_label(_read_fixed(slot, templates[segment.group], read)) for slot in _slots(segment)]
        parts.append(segment.cut(labels, optimizer))
    driver.recut(optimizer, parts)
    for segment in driver.segments:
        template = templates[segment.group]
        fixed = _read_fixed(_slots(segment)[0], template, read, segment.device)
        if fixed is not None:
            before = held.get(segment.parameter, {})
            moments = {
                kind: _read_moments(segment, kind, read, before.get(kind))
                for kind, spec in template.items()
                if spec.per_element
            }
            optimizer.state[segment.parameter] = {kind: (fixed | moments)[kind] for kind in template}


def _read_moments(segment: Segment, kind: str, read: Read, before: Any) -> Tensor:
    """A state per element, in the memory of the one `before` it where that fits: fresh memory would cost its pages."""
    dtype = segment.bucket.precision.moments
    if kind in segment.bucket.moments:
        return _read_apart(segment, kind, read)
    if isinstance(before, Tensor) and (before.shape, before.dtype) == (segment.parameter.shape, dtype):
        whole = before.zero_()
    else:
        whole = torch.zeros_like(segment.parameter, dtype=dtype, requires_grad=False)
    for slot, held in segment.slots():
        value = read(slot.name, kind, held.start - slot.offset, held.stop - slot.offset)
        if value is not None:
            whole[held.within(segment.range)].copy_(value)
    return whole


def _read_apart(segment: Segment, kind: str, read: Read) -> Tensor:
    """A state per element of a segment that is updated away from the device; for one in files, its stand-in."""
    home = segment.bucket.moments[kind]
    for part in home.cuts(segment.range):
        with home.opened(part, "change") as data:
            data.zero_()
    for slot, held in segment.slots():
        _restore(home, slot, kind, held, read)
    if segment.parameter.is_meta:
        return torch.empty(segment.range.numel, dtype=home.dtype, device="meta")
    with home.opened(segment.range) as data:
        return data


def _read_fixed(
    slot: Slot, template: Mapping[str, StateSpec], read: Read, device: torch.device | None = None
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


def _piece(slot: Slot, kind: str, held: Range, state: Resting) -> Piece:
    def read() -> Tensor:
        with state.opened(held) as data:
            return data

    start, stop = held.start - slot.offset, held.stop - slot.offset
    return Piece(slot.name, kind, start, stop, slot.shape, slot.numel, state.dtype, read)


def _moment(segment: Segment, slot: Slot, kind: str, held: Range, value: Tensor) -> Piece:
    """One of the states that the optimizer keeps for each element; `value` is a stand-in where they are in files."""
    if value.is_meta:
        return _piece(slot, kind, held, segment.bucket.moments[kind])
    start, stop = held.start - slot.offset, held.stop - slot.offset
    part = value[held.within(segment.range)]
    return Piece(slot.name, kind, start, stop, slot.shape, slot.numel, value.dtype, lambda: part)


def _whole(slot: Slot, kind: str, value: Tensor) -> Piece:
    return Piece(slot.name, kind, 0, value.numel(), slot.shape, value.numel(), value.dtype, lambda: value)
