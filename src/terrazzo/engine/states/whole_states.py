"""What an optimizer keeps, whole: each state of each parameter as it is in one process."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.resting.buffer import Buffer, Resting
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.optim.stock.probe import OptimizerProbe
from terrazzo.engine.optim.stock.stepper import bare_copy
from terrazzo.engine.optim.stock.template import Template
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.states.pieces import require_known_states
from terrazzo.engine.states.stepped_parameters import SteppedParameters
from terrazzo.engine.states.whole_tensors import gathered_state, whole_parameter

__all__ = ["States", "whole_states"]

States = dict[str, Any]
"""States that an optimizer keeps for one parameter, by kind."""


def whole_states(stepped: SteppedParameters, begun: bool = False) -> Iterator[tuple[str, str, Any]]:
    """Yield each state of each parameter that has any: name, kind, and the value as in one process. Collective.

    Memory: one state of one bucket on the mesh's device; what is per element is to be copied before the next is
    asked for.

    Args:
        begun: where no parameter has any, go by what a step on zero gradients would leave; nothing is changed.

    Raises:
        Misuse: for states that nothing would restore; `BadInput` on ranks that have none.
    """
    stepped.engine.catch_up()
    all_or_none(stepped.engine.axes, lambda: require_known_states([stepped.driver]))
    fixed = _fixed(stepped)
    first = _initial(stepped) if begun and not fixed else {}
    for unit in stepped.engine.units:
        for bucket in (bucket for bucket in unit.trainable() if bucket in stepped.driver.buckets):
            named = {n: i for n, (b, i) in stepped.located.items() if b is bucket and (first or n in fixed)}
            templates = {name: stepped.template_of(name) for name in named}
            moments = {kind for template in templates.values() for kind in template.per_element}
            for kind in sorted(moments):  # the same order on every rank
                keeping = {name: index for name, index in named.items() if kind in templates[name].per_element}
                yield from _moments(stepped, unit, bucket, kind, keeping, first)
            for name, template in templates.items():
                of_name = fixed[name] if fixed else _fixed_part(template, first[stepped.group_of(name)])
                yield from ((name, *each) for each in of_name)


def _moments(
    stepped: SteppedParameters,
    unit: Unit,
    bucket: Bucket,
    kind: str,
    named: Mapping[str, int],
    first: Mapping[int, States],
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield one state that is per element, of some parameters of a bucket, as `whole_states` does."""
    data = None if first else gathered_state(unit, _moment(stepped, bucket, kind))
    for name, index in named.items():
        slot = bucket.slots[index]
        if data is None:
            yield name, kind, _filled(bucket.box(slot).shape, first[bucket.members[index].group][kind])
        else:
            yield name, kind, whole_parameter(unit, bucket, slot, data)


def _moment(stepped: SteppedParameters, bucket: Bucket, kind: str) -> Resting:
    """Return this rank's part of a state that is per element; zeros where there is none."""
    held = [(s, stepped.optimizer.state.get(s.parameter, {})) for s in stepped.driver.segments if s.bucket is bucket]
    if kind in bucket.moments:
        for segment, state in held:
            segment.take_over_states(state)
        if (at_rest := bucket.moments[kind]).space.window is None:
            return at_rest
    own = bucket.space.zeros(bucket.spec.optim_axes, bucket.spec.precision.shown_moments)
    if kind in bucket.moments:
        own.data[at_rest.range.within(own.range)] = at_rest.copied(at_rest.range, own.data.device)
        return own
    for segment, state in held:
        if kind in state:
            own.data[segment.range.within(own.range)] = state[kind]
    return Buffer(bucket.space, bucket.spec.optim_axes, own.data)


def _fixed(stepped: SteppedParameters) -> dict[str, list[tuple[str, Any]]]:
    """States that are not per element, of each parameter that has state, by name. Collective."""
    shape = (
        len(stepped.located),
        1 + max((stepped.template_of(name).fixed_numel for name in stepped.located), default=0),
    )
    table = torch.full(shape, -math.inf, dtype=torch.float64, device=HOST)
    rows = dict(zip(stepped.located, table.unbind(), strict=True))
    for segment in stepped.driver.segments:
        if state := stepped.optimizer.state.get(segment.parameter):
            for slot, _ in segment.slots():
                fixed = stepped.template_of(slot.name).fixed
                numbers = [torch.as_tensor(state[kind]).double().reshape(-1).cpu() for kind in fixed]
                row = torch.cat([torch.zeros(1, dtype=torch.float64, device=HOST), *numbers])
                rows[slot.name][: len(row)] = row
    agreed = stepped.engine.axes.maximum(table, stepped.engine.axes.within_stage)
    rows_agreed = zip(stepped.located, agreed, strict=True)
    return {name: list(_restored(stepped.template_of(name), row[1:])) for name, row in rows_agreed if row[0] == 0}


def _initial(stepped: SteppedParameters) -> dict[int, States]:
    """States after a step on a zero gradient, by param group; the same for each element."""
    alone = bare_copy(stepped.optimizer)
    alone.state = defaultdict(dict)
    probes = [OptimizerProbe(alone, group, torch.device("cpu")) for group in alone.param_groups]
    return {number: probe.step_on_zeros() for number, probe in zip(stepped.driver.groups.numbers, probes, strict=True)}


def _fixed_part(template: Template, state: States) -> list[tuple[str, Any]]:
    """Of one parameter's states those that are not per element."""
    return [(kind, state[kind]) for kind in template.fixed]


def _filled(shape: tuple[int, ...], start: Any) -> Tensor:
    return torch.full(shape, start[0].item(), dtype=start.dtype, device=HOST)


def _restored(template: Template, numbers: Tensor) -> Iterator[tuple[str, Any]]:
    start = 0
    for kind, spec in template.fixed.items():
        stop = start + math.prod(spec.shape)
        yield kind, spec.restored(numbers[start:stop], torch.device("cpu"))
        start = stop
