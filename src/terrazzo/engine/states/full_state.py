"""An optimizer's state whole, by the names of parameters: for libraries that know it in no other form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.buffer import Buffer, Resting
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.optim.stepper import Stepper
from terrazzo.engine.optim.stock import PROBE_NUMEL, StateSpec
from terrazzo.engine.plan.elsewhere import require_whole
from terrazzo.engine.states.restore import restore_optimizer
from terrazzo.engine.states.whole import gathered_state, whole_parameter
from terrazzo.errors import BadInput

__all__ = ["OptimizerStates"]

States = dict[str, Any]
"""What an optimizer keeps for one parameter, by kind."""


class OptimizerStates:
    """What one optimizer of a sharded model keeps."""

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        require_whole(engine.axes, "The whole state of an optimizer")
        self._engine, self._optimizer = engine, optimizer
        self._driver = next(driver for driver in engine.drivers if driver.reference() is optimizer)
        stepped = [
            (b, i) for b in self._driver.buckets for i, m in enumerate(b.members) if m.group in self._driver.groups
        ]
        self._places = {bucket.members[index].name: (bucket, index) for bucket, index in stepped}

    def names(self) -> list[str]:
        """The names of the parameters that the optimizer was built over, in its order."""
        members = [member for bucket in self._engine.buckets() for member in bucket.members]
        by_parameter = {id(member.parameter): member.name for member in members}
        return [by_parameter[id(parameter)] for given in self._driver.given for parameter in given]

    def whole(self) -> Iterator[tuple[str, str, Any]]:
        """Each state of each parameter that has any: name, kind, and the value as in one process. Collective.

        Where no parameter has, they are what a step on zero gradients would leave, and nothing is changed. Memory: one
        state of one bucket on the mesh's device; what is per element is to be copied before the next is asked for.
        """
        self._engine.settle()
        fixed = self._fixed()
        first = {} if fixed else self._first()
        for unit in self._engine.units:
            for bucket in (bucket for bucket in unit.trainable() if bucket in self._driver.buckets):
                named = {n: i for n, (b, i) in self._places.items() if b is bucket and (first or n in fixed)}
                moments = {kind for name in named for kind, spec in self._kept(name).items() if spec.per_element}
                for kind in sorted(moments):  # the same order on every rank
                    kept = {name: index for name, index in named.items() if kind in self._kept(name)}
                    yield from ((name, kind, value) for name, value in self._moments(unit, bucket, kind, kept, first))
                for name, index in named.items():
                    yield from ((name, *each) for each in (fixed[name] if fixed else _fixed_of(first, bucket, index)))

    def _moments(
        self, unit: Unit, bucket: Bucket, kind: str, named: Mapping[str, int], first: Mapping[int, States]
    ) -> Iterator[tuple[str, Tensor]]:
        """One state that is per element, of some parameters of a bucket."""
        data = None if first else gathered_state(unit, self._moment(bucket, kind))
        for name, index in named.items():
            slot = bucket.slots[index]
            if data is None:
                yield name, _filled(bucket.box(slot).shape, first[bucket.members[index].group][kind])
            else:
                yield name, whole_parameter(unit, bucket, slot, data)

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Set all state, from full tensors by name and kind; a parameter without goes back to having none. Collective.

        Args:
            states: each value is looked up once, in the same order on every rank, and this rank's part of it is kept.

        Raises:
            BadInput: for states of other kinds or shapes than the optimizer keeps; nothing has been changed.
        """
        kept: dict[tuple[str, str], tuple[int, Tensor]] = {}
        ranges = self._ranges()
        for name in (name for name in states if name in self._places):
            if (has := set(states[name])) and has != set(self._kept(name)):
                raise BadInput(
                    f"The state of {name!r} has {sorted(has)}, and this {type(self._optimizer).__name__} keeps "
                    f"{sorted(self._kept(name))}: build it with the settings that it was saved with."
                )
        for name, own_states in states.items():
            for kind in own_states if name in self._places else ():
                value, spec = torch.as_tensor(own_states[kind]).detach(), self._kept(name)[kind]
                bucket, index = self._places[name]
                box = bucket.box(bucket.slots[index])
                shape = box.shape if spec.per_element else spec.shape
                if value.numel() != math.prod(shape) or (spec.per_element and value.shape != shape):
                    raise BadInput(
                        f"The state {kind!r} of {name!r} is {tuple(value.shape)} and should be {shape}: load that of "
                        "the same parameters, in the same order."
                    )
                own = box.of(value) if spec.per_element and not box.is_all else value
                flat = own.reshape(-1)
                start, stop = ranges.get(name, (0, 0)) if spec.per_element else (0, flat.numel())
                kept[name, kind] = (start, flat[start:stop].clone())

        def read(name: str, kind: str, start: int, stop: int) -> Tensor | None:
            if (found := kept.get((name, kind))) is None:
                return None
            return found[1][start - found[0] : stop - found[0]] if stop > start else found[1][:0]

        self._engine.settle()
        with torch.no_grad():
            self._driver.restored()
            restore_optimizer(self._driver, read)

    def _kept(self, name: str) -> Mapping[str, StateSpec]:
        bucket, index = self._places[name]
        return self._engine.drivers.templates[bucket.members[index].group]

    def _ranges(self) -> dict[str, tuple[int, int]]:
        """The elements of each parameter whose states this rank has: first, and behind the last."""
        ranges: dict[str, tuple[int, int]] = {}
        for segment in self._driver.segments:
            for slot, part in segment.slots():
                start, stop = part.start - slot.offset, part.stop - slot.offset
                low, high = ranges.get(slot.name, (start, stop))
                ranges[slot.name] = min(low, start), max(high, stop)
        return ranges

    def _moment(self, bucket: Bucket, kind: str) -> Resting:
        """This rank's part of a state that is per element; zeros where there is none."""
        kept = [(s, self._optimizer.state.get(s.parameter, {})) for s in self._driver.segments if s.bucket is bucket]
        if kind in bucket.moments:
            for segment, state in kept:
                segment.adopt(state)
            return bucket.moments[kind]
        own = bucket.space.zeros(bucket.optim_axes, bucket.precision.moments)
        for segment, state in kept:
            if kind in state:
                own.data[segment.range.within(own.range)] = state[kind]
        return Buffer(bucket.space, bucket.optim_axes, own.data)

    def _fixed(self) -> dict[str, list[tuple[str, Any]]]:
        """Names of the parameters with state, and the states that are not per element. Collective."""
        widths = [
            sum(math.prod(spec.shape) for spec in self._kept(name).values() if not spec.per_element)
            for name in self._places
        ]
        table = torch.full((len(self._places), 1 + max(widths, default=0)), -math.inf, dtype=torch.float64)
        rows = dict(zip(self._places, table.unbind(), strict=True))
        for segment in self._driver.segments:
            if state := self._optimizer.state.get(segment.parameter):
                for slot, _ in segment.slots():
                    kinds = [kind for kind, spec in self._kept(slot.name).items() if not spec.per_element]
                    numbers = [torch.as_tensor(state[kind]).double().reshape(-1).cpu() for kind in kinds]
                    row = torch.cat([torch.zeros(1, dtype=torch.float64), *numbers])
                    rows[slot.name][: len(row)] = row
        axes = self._engine.axes
        told = axes.maximum(table.to(axes.control_device)).cpu()
        found = zip(self._places, told, strict=True)
        return {name: list(_unpacked(self._kept(name), row[1:])) for name, row in found if row[0] == 0}

    def _first(self) -> dict[int, States]:
        """What is kept after a step on a zero gradient, by param group; the same for each element."""
        stepper, states = Stepper(self._optimizer, self._driver.groups.start), {}
        for group in self._driver.groups:
            probe = nn.Parameter(torch.zeros(PROBE_NUMEL))
            probe.grad = torch.zeros_like(probe)
            states[group] = stepper.step(group, probe, {})
        return states


def _filled(shape: tuple[int, ...], start: Any) -> Tensor:
    return torch.full(shape, start[0].item(), dtype=start.dtype)


def _fixed_of(first: Mapping[int, States], bucket: Bucket, index: int) -> Iterator[tuple[str, Any]]:
    for kind, value in first[bucket.members[index].group].items():
        if not isinstance(value, Tensor) or value.shape != (PROBE_NUMEL,):
            yield kind, value


def _unpacked(kept: Mapping[str, StateSpec], numbers: Tensor) -> Iterator[tuple[str, Any]]:
    start = 0
    for kind, spec in kept.items():
        if not spec.per_element:
            stop = start + math.prod(spec.shape)
            yield kind, spec.restored(numbers[start:stop], torch.device("cpu"))
            start = stop
