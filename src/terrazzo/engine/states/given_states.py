"""What an optimizer keeps, given whole: of each state a rank takes its own part, once all have been given the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from terrazzo.engine.consensus.digest import compared_digest
from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.states.restore import restore_optimizer
from terrazzo.engine.states.stepped_parameters import SteppedParameters
from terrazzo.errors import BadInput, RanksApart
from terrazzo.messages import listed, warn

__all__ = ["take_states", "warn_of_unstepped"]


def take_states(stepped: SteppedParameters, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Set all state, from full tensors by name and kind; a parameter that has none there loses its own. Collective.

    Args:
        states: each value is looked up once, in the same order on every rank, and this rank's part of it is kept.

    Raises:
        BadInput: for states of different kinds or shapes than the optimizer keeps, on any rank; nothing has been
            changed.
        RanksApart: where ranks were given different states; nothing has been changed.
    """
    stepped.engine.requires.at_rest("optimizer.load_state_dict()")
    by_name = {name: states.get(name, {}) for name in stepped.located}
    all_or_none(stepped.engine.axes, lambda: _check_kinds(stepped, by_name))
    _compare(stepped.engine.axes, {name: sorted(kinds) for name, kinds in by_name.items()})
    taken = all_or_none(stepped.engine.axes, lambda: _taken(stepped, by_name))
    _compare(stepped.engine.axes, {f"{name}: {kind}": part.digest for (name, kind), part in taken.items()})
    stepped.engine.settle()
    with torch.no_grad():
        restore_optimizer(stepped.driver, _TakenStates(taken))
    stepped.driver.off_device.restored("states")


def warn_of_unstepped(states: Mapping[str, Mapping[str, Any]]) -> None:
    """Say, of states by the name of their parameter, that nothing keeps them: no optimizer steps what is frozen."""
    stepped = [name for name, state in states.items() if state and torch.as_tensor(state.get("step", 1)).any()]
    if stepped and dist.get_rank() == 0:  # others, such as Adagrad's, are made as it is built
        warn(
            f"The optimizer has states of {listed([*map(repr, stepped)])}, which are frozen, so that it does not step "
            "them here: they are not kept, and the next state dict or checkpoint is without them. Parameters that are "
            "to be trained need requires_grad before tz.shard."
        )


def _check_kinds(stepped: SteppedParameters, by_name: Mapping[str, Mapping[str, Any]]) -> None:
    for name, kinds in by_name.items():
        if (has := set(kinds)) and has != set(stepped.template_of(name)):
            raise BadInput(
                f"The state of {name!r} has {sorted(has)}, and this {stepped.driver.kind.__name__} keeps "
                f"{sorted(stepped.template_of(name))}: build it with the settings that it was saved with."
            )


class _Taken(NamedTuple):
    """Part that this rank keeps of a state that it was given whole.

    Attributes:
        start: first element of this rank's part.
        values: the part, 1-D.
        digest: what stands for the whole state when ranks compare.
    """

    start: int
    values: Tensor
    digest: Tensor


@dataclass(frozen=True)
class _TakenStates:
    """A `StateReader` of what this rank has kept of each state, by name and kind."""

    taken: Mapping[tuple[str, str], _Taken]

    def has(self, name: str, kind: str) -> bool:
        return (name, kind) in self.taken

    def read(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        part = self.taken[name, kind]
        return part.values[start - part.start : stop - part.start]


def _taken(stepped: SteppedParameters, by_name: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], _Taken]:
    """Cut this rank's part out of each state, by name and kind."""
    taken, ranges, axes = {}, _ranges(stepped), stepped.engine.axes
    for name, kinds in by_name.items():
        for kind in kinds:
            value, spec = torch.as_tensor(kinds[kind]).detach(), stepped.template_of(name)[kind]
            bucket, index = stepped.located[name]
            box = bucket.box(bucket.slots[index])
            shape = box.shape if spec.per_element else spec.shape
            if value.numel() != math.prod(shape) or (spec.per_element and value.shape != shape):
                raise BadInput(
                    f"The state {kind!r} of {name!r} is {tuple(value.shape)} and should be {shape}: load that of "
                    "the same parameters, in the same order."
                )
            compared = compared_digest(value, axes, axes.within_stage)
            own = box.of(value) if spec.per_element and not box.is_all else value
            flat = own.reshape(-1)
            start, stop = ranges.get(name, (0, 0)) if spec.per_element else (0, flat.numel())
            taken[name, kind] = _Taken(start, flat[start:stop].clone(), compared)
    return taken


def _ranges(stepped: SteppedParameters) -> dict[str, tuple[int, int]]:
    """The elements of each parameter whose states this rank has: from which one on, and up to which."""
    ranges: dict[str, tuple[int, int]] = {}
    for segment in stepped.driver.segments:
        for slot, part in segment.slots():
            start, stop = part.start - slot.offset, part.stop - slot.offset
            low, high = ranges.get(slot.name, (start, stop))
            ranges[slot.name] = min(low, start), max(high, stop)
    return ranges


def _compare(axes: Axes, facts: Mapping[str, object]) -> None:
    """Refuse what ranks were given differently.

    Raises:
        RanksApart: there.
    """
    if differing := axes.differing(facts, axes.within_stage):
        raise RanksApart(
            f"optimizer.load_state_dict: the ranks were given other states of {listed([*map(repr, differing)])}. "
            "Nothing has been loaded. Give every rank the same state dict."
        )
