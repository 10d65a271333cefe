"""State of an optimizer whole, by the names of parameters, and as torch has it in a state dict."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.resting.buffer import Buffer, Resting
from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.consensus.digest import digest
from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.model.engine import Engine
from terrazzo.engine.optim.stock.param_groups import take_fused
from terrazzo.engine.optim.stock.probe import OptimizerProbe
from terrazzo.engine.optim.stock.settings import NOT_HYPER
from terrazzo.engine.optim.stock.stepper import bare_copy
from terrazzo.engine.optim.stock.template import Template
from terrazzo.engine.pipeline.stages import require_whole
from terrazzo.engine.runtime.device import HOST
from terrazzo.engine.states.pieces import require_known_states
from terrazzo.engine.states.restore import restore_optimizer
from terrazzo.engine.states.whole_tensors import gathered_state, whole_parameter
from terrazzo.errors import BadInput, RanksApart
from terrazzo.messages import listed

__all__ = ["OptimizerStates"]

States = dict[str, Any]
"""States that an optimizer keeps for one parameter, by kind."""


class OptimizerStates:
    """State that one optimizer of a sharded model keeps.

    Attributes:
        engine: of the model.
    """

    def __init__(self, engine: Engine, optimizer: Optimizer) -> None:
        require_whole(engine.axes, "The whole state of an optimizer")
        self.engine, self._optimizer = engine, optimizer
        self._driver = next(driver for driver in engine.drivers if driver.reference() is optimizer)
        self._located = {
            member.name: (bucket, index)
            for bucket in self._driver.buckets
            for index, member in enumerate(bucket.members)
            if member.group in self._driver.groups.numbers
        }

    def names(self) -> list[str]:
        """The names of the parameters that the optimizer was built over, in its order."""
        return [name for _, name in self._named()]

    def _named(self) -> list[tuple[nn.Parameter, str]]:
        members = [member for bucket in self.engine.buckets() for member in bucket.members]
        by_parameter = {id(member.parameter): member.name for member in members}
        return [
            (parameter, by_parameter[id(parameter)])
            for parameters in self._driver.groups.parameters
            for parameter in parameters
        ]

    def state_dict(self, keep: Callable[[Tensor], Tensor], begun: bool = False) -> dict[str, Any]:
        """State dict as the optimizer's class has it, over whole parameters: hooks for them are called. Collective.

        Memory: what is kept, and one state of one bucket on the mesh's device.

        Args:
            keep: what is to be in the place of a tensor, full and only here until the next one comes.
            begun: whether parameters have states before the first step: those that one on zero gradients would leave.
        """
        self.engine.requires.at_rest("optimizer.state_dict()", reads="states")
        shown: dict[str, States] = defaultdict(dict)
        for name, kind, value in self.whole(begun):
            shown[name][kind] = keep(value) if isinstance(value, Tensor) and value.dim() else value
        alone, kind_of = bare_copy(self._optimizer), self._driver.kind
        alone.state = defaultdict(dict)
        for parameter, name in ((parameter, name) for parameter, name in self._named() if name in shown):
            alone.state[parameter] = {
                kind: shown[name][kind] for kind in self._template_of(name) if kind in shown[name]
            }
        state_dict: dict[str, Any] = kind_of.state_dict(alone)
        return state_dict

    def load_state_dict(self, state_dict: Any, whole: Callable[[Any], Any] = lambda value: value) -> None:
        """Set all state and the settings of param groups from a state dict over whole parameters. Collective.

        Residuals of its parameters' gradients become zero: the dict has none, and those here are of another run.

        Args:
            state_dict: the same on every rank, by the order of parameters.
            whole: makes a tensor of a state there, which is looked up once, in the same order on every rank.

        Raises:
            BadInput: for what is no optimizer's state dict, groups of different sizes, and states of different kinds or
                shapes, on any rank. Hooks from before loading have been called by then, and nothing else has been done.
            RanksApart: where ranks were given different states, likewise.
        """
        optimizer = self._optimizer
        edited = all_or_none(self.engine.axes, lambda: self._checked(state_dict))
        names = self.names()
        keys = [key for group in edited["param_groups"] for key in group["params"]]
        self.load({name: _Whole(edited["state"].get(key, {}), whole) for name, key in zip(names, keys, strict=True)})
        for bucket, index in self._located.values():
            for residual in bucket.gradient.residuals:
                residual.clear([index])
        for group, other in zip(optimizer.param_groups, edited["param_groups"], strict=True):
            is_fused = group.get("fused")  # as the plan's tiers need, perhaps: the run goes on with its own kernel
            group.update(copy.deepcopy({key: value for key, value in other.items() if key not in NOT_HYPER}))
            if is_fused:
                take_fused(group)
        for after in optimizer._optimizer_load_state_dict_post_hooks.values():
            after(optimizer)

    def _checked(self, state_dict: Any) -> dict[str, Any]:
        """Return a state dict as hooks change it.

        Raises:
            BadInput: where it is none, or of different parameters.
        """
        _check_form(state_dict)
        own, optimizer, edited = self._driver.kind.load_state_dict, self._optimizer, dict(state_dict)
        if own is not Optimizer.load_state_dict:
            raise BadInput(
                f"{self._driver.kind.__name__} has a load_state_dict of its own, which a sharded optimizer does not "
                "call. Do what it does in a hook, optimizer.register_load_state_dict_post_hook, or load before "
                "tz.shard."
            )
        for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
            changed = before(optimizer, edited)
            edited = edited if changed is None else changed
        _check_form(edited)
        sizes = [
            [len(group["params"]) for group in groups] for groups in (edited["param_groups"], optimizer.param_groups)
        ]
        if sizes[0] != sizes[1]:
            raise BadInput(
                f"The optimizer's state has param groups of {sizes[0]} parameters, and this "
                f"{self._driver.kind.__name__} has {sizes[1]}: build it over the same parameters, in the same order."
            )
        return edited

    def whole(self, begun: bool = False) -> Iterator[tuple[str, str, Any]]:
        """Yield each state of each parameter that has any: name, kind, and the value as in one process. Collective.

        Memory: one state of one bucket on the mesh's device; what is per element is to be copied before the next is
        asked for.

        Args:
            begun: where no parameter has any, go by what a step on zero gradients would leave; nothing is changed.

        Raises:
            Misuse: for states that nothing would restore; `BadInput` on ranks that have none.
        """
        self.engine.catch_up()
        all_or_none(self.engine.axes, lambda: require_known_states([self._driver]))
        fixed = self._fixed()
        first = self._initial() if begun and not fixed else {}
        for unit in self.engine.units:
            for bucket in (bucket for bucket in unit.trainable() if bucket in self._driver.buckets):
                named = {n: i for n, (b, i) in self._located.items() if b is bucket and (first or n in fixed)}
                moments = {kind for name in named for kind in self._template_of(name).per_element}
                for kind in sorted(moments):  # the same order on every rank
                    indices = {name: index for name, index in named.items() if kind in self._template_of(name)}
                    yield from self._moments(unit, bucket, kind, indices, first)
                for name in named:
                    yield from ((name, *each) for each in (fixed[name] if fixed else self._fixed_of(name, first)))

    def _moments(
        self, unit: Unit, bucket: Bucket, kind: str, named: Mapping[str, int], first: Mapping[int, States]
    ) -> Iterator[tuple[str, str, Tensor]]:
        """Yield one state that is per element, of some parameters of a bucket, as `whole` does."""
        data = None if first else gathered_state(unit, self._moment(bucket, kind))
        for name, index in named.items():
            slot = bucket.slots[index]
            if data is None:
                yield name, kind, _filled(bucket.box(slot).shape, first[bucket.members[index].group][kind])
            else:
                yield name, kind, whole_parameter(unit, bucket, slot, data)

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Set all state, from full tensors by name and kind; a parameter that has none there loses its own. Collective.

        Args:
            states: each value is looked up once, in the same order on every rank, and this rank's part of it is kept.

        Raises:
            BadInput: for states of different kinds or shapes than the optimizer keeps, on any rank; nothing has been
                changed.
            RanksApart: where ranks were given different states; nothing has been changed.
        """
        self.engine.requires.at_rest("optimizer.load_state_dict()")
        by_name = {name: states.get(name, {}) for name in self._located}
        all_or_none(self.engine.axes, lambda: self._check_kinds(by_name))
        self._compare({name: sorted(kinds) for name, kinds in by_name.items()})
        taken = all_or_none(self.engine.axes, lambda: self._taken(by_name))
        self._compare({f"{name}: {kind}": part.digest for (name, kind), part in taken.items()})
        self.engine.settle()
        with torch.no_grad():
            restore_optimizer(self._driver, _TakenStates(taken))
        self._driver.off_device.restored("states")

    def _check_kinds(self, by_name: Mapping[str, Mapping[str, Any]]) -> None:
        for name, kinds in by_name.items():
            if (has := set(kinds)) and has != set(self._template_of(name)):
                raise BadInput(
                    f"The state of {name!r} has {sorted(has)}, and this {self._driver.kind.__name__} keeps "
                    f"{sorted(self._template_of(name))}: build it with the settings that it was saved with."
                )

    def _taken(self, by_name: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], _Taken]:
        """Cut this rank's part out of each state, by name and kind."""
        taken, ranges, alone = {}, self._ranges(), not self.engine.axes.live(self.engine.axes.within_stage)
        for name, kinds in by_name.items():
            for kind in kinds:
                value, spec = torch.as_tensor(kinds[kind]).detach(), self._template_of(name)[kind]
                bucket, index = self._located[name]
                box = bucket.box(bucket.slots[index])
                shape = box.shape if spec.per_element else spec.shape
                if value.numel() != math.prod(shape) or (spec.per_element and value.shape != shape):
                    raise BadInput(
                        f"The state {kind!r} of {name!r} is {tuple(value.shape)} and should be {shape}: load that of "
                        "the same parameters, in the same order."
                    )
                compared = torch.zeros((), dtype=torch.int64, device=HOST) if alone else digest(value.cpu())
                own = box.of(value) if spec.per_element and not box.is_all else value
                flat = own.reshape(-1)
                start, stop = ranges.get(name, (0, 0)) if spec.per_element else (0, flat.numel())
                taken[name, kind] = _Taken(start, flat[start:stop].clone(), compared)
        return taken

    def _compare(self, facts: Mapping[str, object]) -> None:
        """Refuse what ranks were given differently.

        Raises:
            RanksApart: there.
        """
        if differing := self.engine.axes.differing(facts, self.engine.axes.within_stage):
            raise RanksApart(
                f"optimizer.load_state_dict: the ranks were given other states of {listed([*map(repr, differing)])}. "
                "Nothing has been loaded. Give every rank the same state dict."
            )

    def _template_of(self, name: str) -> Template:
        bucket, index = self._located[name]
        return self.engine.drivers.templates[bucket.members[index].group]

    def _ranges(self) -> dict[str, tuple[int, int]]:
        """The elements of each parameter whose states this rank has: first, and one past the last."""
        ranges: dict[str, tuple[int, int]] = {}
        for segment in self._driver.segments:
            for slot, part in segment.slots():
                start, stop = part.start - slot.offset, part.stop - slot.offset
                low, high = ranges.get(slot.name, (start, stop))
                ranges[slot.name] = min(low, start), max(high, stop)
        return ranges

    def _moment(self, bucket: Bucket, kind: str) -> Resting:
        """Return this rank's part of a state that is per element; zeros where there is none."""
        stepped = [(s, self._optimizer.state.get(s.parameter, {})) for s in self._driver.segments if s.bucket is bucket]
        if kind in bucket.moments:
            for segment, state in stepped:
                segment.take_over_states(state)
            if (at_rest := bucket.moments[kind]).space.window is None:
                return at_rest
        own = bucket.space.zeros(bucket.spec.optim_axes, bucket.spec.precision.shown_moments)
        if kind in bucket.moments:
            own.data[at_rest.range.within(own.range)] = at_rest.copied(at_rest.range, own.data.device)
            return own
        for segment, state in stepped:
            if kind in state:
                own.data[segment.range.within(own.range)] = state[kind]
        return Buffer(bucket.space, bucket.spec.optim_axes, own.data)

    def _fixed(self) -> dict[str, list[tuple[str, Any]]]:
        """States that are not per element, of each parameter that has state, by name. Collective."""
        shape = len(self._located), 1 + max((self._template_of(name).fixed_numel for name in self._located), default=0)
        table = torch.full(shape, -math.inf, dtype=torch.float64, device=HOST)
        rows = dict(zip(self._located, table.unbind(), strict=True))
        for segment in self._driver.segments:
            if state := self._optimizer.state.get(segment.parameter):
                for slot, _ in segment.slots():
                    fixed = self._template_of(slot.name).fixed
                    numbers = [torch.as_tensor(state[kind]).double().reshape(-1).cpu() for kind in fixed]
                    row = torch.cat([torch.zeros(1, dtype=torch.float64, device=HOST), *numbers])
                    rows[slot.name][: len(row)] = row
        agreed = self.engine.axes.maximum(table, self.engine.axes.within_stage)
        rows_agreed = zip(self._located, agreed, strict=True)
        return {name: list(_unpacked(self._template_of(name), row[1:])) for name, row in rows_agreed if row[0] == 0}

    def _initial(self) -> dict[int, States]:
        """States after a step on a zero gradient, by param group; the same for each element."""
        alone = bare_copy(self._optimizer)
        alone.state = defaultdict(dict)
        probes = [OptimizerProbe(alone, group, torch.device("cpu")) for group in alone.param_groups]
        return {
            number: probe.step_on_zeros() for number, probe in zip(self._driver.groups.numbers, probes, strict=True)
        }

    def _fixed_of(self, name: str, first: Mapping[int, States]) -> Iterator[tuple[str, Any]]:
        """The first states of a parameter that are not per element."""
        bucket, index = self._located[name]
        state = first[bucket.members[index].group]
        yield from ((kind, state[kind]) for kind in self._template_of(name).fixed)


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


class _Whole(Mapping[str, Any]):
    """States of one parameter, each made whole as it is read; one that is None is not there."""

    def __init__(self, states: Mapping[str, Any], whole: Callable[[Any], Any]) -> None:
        self._states, self._whole = {kind: value for kind, value in states.items() if value is not None}, whole

    def __getitem__(self, kind: str) -> Any:
        return self._whole(self._states[kind])

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def _check_form(state_dict: Any) -> None:
    """Refuse what does not have the form of an optimizer's state dict.

    Raises:
        BadInput: there.
    """
    if not (isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()):
        raise BadInput(
            f"optimizer.load_state_dict takes what optimizer.state_dict() gives, not {_described(state_dict)}. Of a "
            "program's whole file that is one entry; tz.checkpoint.load(path, model, optimizer) reads all of it."
        )
    states, groups = state_dict["state"], state_dict["param_groups"]
    if not (isinstance(states, Mapping) and all(isinstance(each, Mapping) for each in states.values())):
        raise BadInput(
            f"optimizer.load_state_dict: 'state' is {_described(states)}, and is to have a dict for each parameter, by "
            "number. Give what optimizer.state_dict() gave."
        )
    if not (isinstance(groups, list | tuple) and all(isinstance(g, Mapping) and "params" in g for g in groups)):
        raise BadInput(
            f"optimizer.load_state_dict: 'param_groups' is {_described(groups)}, and is to be a list of dicts with "
            "'params'. Give what optimizer.state_dict() gave."
        )


def _described(value: Any) -> str:
    return f"a dict of {listed([*map(repr, value)], 5)}" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _filled(shape: tuple[int, ...], start: Any) -> Tensor:
    return torch.full(shape, start[0].item(), dtype=start.dtype, device=HOST)


def _unpacked(template: Template, numbers: Tensor) -> Iterator[tuple[str, Any]]:
    start = 0
    for kind, spec in template.fixed.items():
        stop = start + math.prod(spec.shape)
        yield kind, spec.restored(numbers[start:stop], torch.device("cpu"))
        start = stop
