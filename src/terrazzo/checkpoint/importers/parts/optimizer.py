"""The state dicts of torch optimizers: numbered, by name, or flattened to one level."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from terrazzo.checkpoint.importers.parts.numbering import ModelNames, Number, in_groups, in_order, name_numbers
from terrazzo.checkpoint.importers.parts.state_dict import OPTIMIZER_KEYS, StateDictSource, add_extra, divide
from terrazzo.checkpoint.importers.parts.tree import keep
from terrazzo.checkpoint.importers.parts.values import LoadedTensor, Values
from terrazzo.checkpoint.source import BUFFER, WEIGHT, OptimizerInfo
from terrazzo.errors import BadInput

__all__ = ["add_optimizer", "add_program", "add_scaler", "optimizer_in"]

SCALER_KEYS = ("scaler", "grad_scaler", "scaler_state_dict")
STEP_KEYS = ("global_step", "step")
_LISTS = ("params", "param_names")
_OWN_ORDER = (
    "the optimizer's state only numbers its parameters, which are taken to be in the order of this run's param groups"
    " (they fit the model's order, too)"
)

SavedGroup = Mapping[str, Any]
States = Mapping[Number, Mapping[str, Any]]


def add_program(
    source: StateDictSource,
    tree: Mapping[str, Any],
    names: ModelNames,
) -> None:
    """All that a program saved in one state dict.

    `step` is what the optimizer counted, else what the program says.
    """
    sections = divide(tree, source.where)
    source.add_model(sections.model, names.order)
    rest = dict(sections.rest)
    if sections.optimizer is not None:
        add_optimizer(source, sections.optimizer, names)
        for key in SCALER_KEYS:
            if add_scaler(source, rest.get(key)):
                del rest[key]
    add_extra(source, rest)
    steps = (source.extra.get(key) for key in STEP_KEYS)
    source.step = source.step or next((step for step in steps if type(step) is int and step > 0), 0)


def optimizer_in(tree: Any, where: str) -> Mapping[str, Any]:
    """The optimizer's state dict that `tree` is, or has under a usual key."""
    state_dict = tree
    if isinstance(tree, Mapping) and "param_groups" not in tree:
        state_dict = next((tree[key] for key in OPTIMIZER_KEYS if key in tree), tree)
    if not isinstance(state_dict, Mapping):
        raise BadInput(f"'{where}' holds no optimizer's state dict but a {type(state_dict).__name__}: remove it.")
    return state_dict


def add_optimizer(
    source: StateDictSource,
    state_dict: Mapping[str, Any],
    names: ModelNames,
) -> None:
    """An optimizer's state dict, for the tensors that `source` has already.

    Args:
        names: for one that only numbers its parameters. Where none are known, it is left out with a note.

    Raises:
        BadInput: it is none, or of other parameters.
    """
    saved, states = _parts(state_dict, _where(source))
    named = _named(source, saved, states, names)
    if named is None:
        source.optimizer_notes.append(
            "the optimizer's state is not taken over: it only numbers the parameters. Open the checkpoint with the"
            " model that was trained, which tells their names in order"
        )
        return
    for number, entries in states.items():
        for kind, value in entries.items():
            _add_state(source, named[number], str(kind), value)
    source.optimizer = OptimizerInfo("", [_group(source, group, named) for group in saved])
    source.step = _step(source)


def add_scaler(source: StateDictSource, state: Any) -> bool:
    """Whether `state` is that of torch's `GradScaler`; if so it is taken over. It lowers its scale at once."""
    counters: dict[str, Any] = {}
    keep(counters, "scaler", state, [])
    saved = counters.get("scaler")
    if source.optimizer is None or not isinstance(saved, dict):
        return False
    scale, good_steps = saved.get("scale"), saved.get("_growth_tracker")
    if not isinstance(scale, int | float) or not isinstance(good_steps, int | float):
        return False
    scaler = {"scale": float(scale), "skipped_steps": 0.0, "good_steps": float(good_steps), "patience": 1.0}
    source.optimizer = replace(source.optimizer, scaler=scaler)
    return True


def _parts(state_dict: Mapping[str, Any], where: str) -> tuple[list[SavedGroup], States]:
    """Groups, and states by name or number, each of which is in one group."""
    groups, states = state_dict.get("param_groups"), state_dict.get("state", {})
    if groups is None and any(str(key).startswith("param_groups.") for key in state_dict):
        groups, states = _unflattened(state_dict)
    if not _are_groups(groups) or not isinstance(states, Mapping):
        raise BadInput(f"{where} is not that of a torch optimizer: its entries are {list(state_dict)[:8]}.")
    listed = [number for group in groups for number in group["params"]]
    numbers = {str(number): number for number in listed}  # of numbers, some formats make text
    if len(numbers) != len(listed):
        raise BadInput(f"{where} has a parameter in two groups: it is damaged.")
    for key, entries in states.items():
        if str(key) not in numbers or not isinstance(entries, Mapping):
            raise BadInput(f"{where} has an entry {key!r} that is not the state of a parameter: it is damaged.")
    return groups, {numbers[str(key)]: entries for key, entries in states.items()}


def _are_groups(groups: Any) -> TypeGuard[list[SavedGroup]]:
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    lists = [group.get("params") for group in groups]
    return all(isinstance(numbers, list) and all(isinstance(n, int | str) for n in numbers) for numbers in lists)


def _unflattened(state_dict: Mapping[str, Any]) -> tuple[list[SavedGroup], States]:
    """From `state.<name>.<kind>` and `param_groups.<name>.<key>`: parameters of equal values make a group."""
    states: dict[Number, dict[str, Any]] = defaultdict(dict)
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in state_dict.items():
        section, _, path = str(key).partition(".")
        name, _, last = path.rpartition(".")
        if section == "state":
            states[name][last] = value
        elif section == "param_groups" and last not in _LISTS:
            values[name][last] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, hyper in values.items():
        group: dict[str, Any] = {}
        keep(group, "group", hyper, [])
        groups.setdefault(repr(sorted(group.items())), {**hyper, "params": []})["params"].append(name)
    return list(groups.values()), states


def _named(
    source: StateDictSource,
    groups: list[SavedGroup],
    states: States,
    known: ModelNames,
) -> dict[Number, str] | None:
    """The tensor's name of each parameter; None where nothing tells."""
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        return {number: _resolved(source, number) for number in numbers}
    listed = [name for group in groups for name in group.get("param_names") or ()]
    if len(listed) == len(numbers):
        return {number: _resolved(source, name) for number, name in zip(numbers, listed, strict=True)}
    if not known.order:
        return None
    every = _shapes(source, known.order)
    trained = _shapes(source, [name for name in known.order if name not in known.frozen])
    shapes = trained if len(trained) == len(numbers) else every
    element_shapes = {number: _element_shapes(entries) for number, entries in states.items()}
    numbered = [group["params"] for group in groups]
    own_names = [list(_shapes(source, group)) for group in known.groups]
    for listed_names in (own_names, [[name for name in group if name in trained] for group in own_names]):
        if (in_own := in_groups(numbered, listed_names, element_shapes, every)) is not None:
            if in_order(numbers, element_shapes, shapes) not in (None, in_own):
                source.optimizer_notes.append(_OWN_ORDER)
            return in_own
    return name_numbers(numbered, element_shapes, shapes, _where(source))


def _resolved(source: StateDictSource, name: str) -> str:
    resolved = source.resolve([source.rename(name)])
    if resolved is None:
        raise BadInput(f"{_where(source)} is also for a parameter '{name}', which has no weight there.")
    return resolved


def _shapes(source: StateDictSource, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    resolved = (source.resolve([source.rename(name)]) for name in names)
    return {name: source.tensors[name].shape for name in resolved if name is not None}


def _where(source: StateDictSource) -> str:
    return f"The optimizer state in '{source.where}'"


def _element_shapes(entries: Mapping[str, Any]) -> list[tuple[int, ...]]:
    return [v.shape for kind, v in entries.items() if isinstance(v, Values) and v.shape and kind != "step"]


def _add_state(source: StateDictSource, name: str, kind: str, value: Any) -> None:
    if isinstance(value, int | float):  # what older optimizers count steps in
        value = LoadedTensor(torch.tensor([float(value)], dtype=torch.float32), kind)
    if isinstance(value, Values) and kind not in (WEIGHT, BUFFER):
        source.add(name, kind, value)
    elif value is not None:
        source.optimizer_notes.append(f"{kind} of {name}, of the optimizer, is not taken over: it is no tensor")


def _group(source: StateDictSource, group: SavedGroup, named: Mapping[Number, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    left: list[str] = []
    for key, value in group.items():
        if key not in _LISTS:
            keep(values, str(key), value, left)
    source.optimizer_notes += [f"of a param group: {line}" for line in left]
    return {**values, "params": [named[number] for number in group["params"]]}


def _step(source: StateDictSource) -> int:
    """How often the first parameter that counts has been updated."""
    for name, info in source.tensors.items():
        if "step" in info.states and info.states["step"].numel == 1:
            steps = source.values(name, "step").item()
            return int(steps) if isinstance(steps, int | float) and math.isfinite(steps) and steps > 0 else 0
    return 0
