"""Whether a checkpoint fits a model and its optimizer: every difference, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from terrazzo.checkpoint.optimizers import optimizer_name, scaler_of
from terrazzo.checkpoint.source import AVERAGE, BESIDE_OPTIMIZER, BUFFER, WEIGHT, Source, StateInfo, is_of_optimizer
from terrazzo.checkpoint.tied_names import names_apart
from terrazzo.engine import ModelState, TableRow, engine_of, persistent_buffers
from terrazzo.engine.plan.diloco import OUTER_MOMENTUM
from terrazzo.engine.plan.error_feedback import RESIDUAL, RESIDUAL_DTYPE, RESIDUAL_OF_SUMS
from terrazzo.engine.states.state_names import first_of, is_numbered, numbered

__all__ = ["ROUNDED", "fitted_groups", "misfits", "misfits_of_ties", "unkept", "unstepped", "untied"]

MOST = 3
ROUNDED = "would be rounded"


def misfits(
    source: Source, model: torch.nn.Module, listed: Sequence[TableRow], with_optimizer: bool, cast: bool
) -> Iterator[str]:
    """Why `source` cannot be loaded: of each kind of reason the first three, and how many more there are.

    What is of another shape is named once, and its states not again.
    """
    shapes = {each.names: each.shape for each in listed}
    buffers = {tuple(buffer.names): tuple(buffer.tensor.shape) for buffer in persistent_buffers(model)}
    shapes |= buffers
    names_there = {names: source.resolve(names) for names in shapes}
    if (front := _in_front_of_all(source, names_there)) is not None:
        yield (
            f"each of its names has '{front}' in front, as where a module holds this one as an attribute: load it into"
            " such a module, or save the state dict of this one alone"
        )
        return
    yield from _first_few(f"missing: {_shown(names[0])}" for names, name in sorted(names_there.items()) if name is None)
    unused = set(source.tensors) - set(names_there.values())
    if not source.names_ties:  # one tensor may be there under all of its names
        unused -= {name for names in shapes for name in names}
    yield from _first_few(f"not in the model: {_shown(name)}" for name in sorted(unused))
    both = [(names, name, source.tensors[name]) for names, name in names_there.items() if name is not None]
    yield from _first_few(
        f"{_shown(name)} is {list(info.shape)} in the checkpoint and {list(shapes[names])} in the model"
        for names, name, info in both
        if info.shape != shapes[names]
    )
    yield from _first_few(
        f"{_shown(name)} has no weight in the checkpoint"
        for names, name, info in both
        if not info.states.keys() & ({WEIGHT, BUFFER} if names in buffers else {WEIGHT})
    )
    yield from _first_few(_buffer_misfits(source, model, cast))
    if with_optimizer and (others := _of_another_optimizer(source, model)):
        yield others  # whose states are others, too
        with_optimizer = False
    yield from _first_few(_state_misfits(source, model, with_optimizer, cast))
    if with_optimizer:
        yield from _optimizer_misfits(source, model, listed)


def _in_front_of_all(source: Source, names_there: Mapping[tuple[str, ...], str | None]) -> str | None:
    """What stands in front of all of the model's names in `source`; None where one is there by itself, or is not."""
    if not names_there or any(name is not None for name in names_there.values()):
        return None
    own = [names[0] for names in names_there]
    fronts = (name.removesuffix(own[0]) for name in source.tensors if name.endswith(f".{own[0]}"))
    return next((front for front in fronts if all(f"{front}{name}" in source.tensors for name in own)), None)


def misfits_of_ties(
    source: Source, model: torch.nn.Module, listed: Sequence[TableRow], part: int, parts: int
) -> list[str]:
    """Tensors of the model that `source` has under several names with different values; of parameters in a part."""
    apart = [*names_apart(source, [each.names for each in listed], part, parts)]
    apart += names_apart(source, [buffer.names for buffer in persistent_buffers(model)])
    return [*_first_few(f"{_shown(one)} and {_shown(other)} are one tensor in the model, and differ in the checkpoint"
                        for one, other in apart)]  # fmt: skip


def _first_few(lines: Iterable[str]) -> Iterator[str]:
    """The first of them, of a model that may have thousands of tensors, and how many more there are."""
    all_lines = list(lines)
    yield from all_lines[:MOST]
    if len(all_lines) > MOST:
        yield f"and {len(all_lines) - MOST} more like these"


def unstepped(source: Source, listed: Sequence[TableRow]) -> list[str]:
    """Parameters of which `source` has an optimizer's states, and which nothing steps here, by their names there."""
    resolved = [source.resolve(each.names) for each in listed if not each.is_stepped]
    return [name for name in resolved if name is not None and any(map(is_of_optimizer, source.tensors[name].states))]


def untied(source: Source, listed: Sequence[TableRow]) -> list[str]:
    """Parameters that are one tensor in `source`, and several here: in a line, by the names that they have here."""
    here: dict[str, list[str]] = {}
    for each in listed:
        if (name := source.resolve(each.names)) is not None:
            here.setdefault(name, []).append(each.name)
    return [" and ".join(names) for names in here.values() if len(names) > 1]


def unkept(source: Source, model: torch.nn.Module) -> list[str]:
    """What `source` has beside an optimizer's states and nothing keeps here, in words."""
    engine = engine_of(model)
    kept = {AVERAGE} if engine.average is not None else set()
    if _has_momentum(model):
        kept.add(OUTER_MOMENTUM)
    if any(bucket.gradient.residuals for bucket in engine.trainable()):
        kept |= {RESIDUAL, RESIDUAL_OF_SUMS}
    there = {first_of(kind) for info in source.tensors.values() for kind in info.states}
    return [words for kind, words in BESIDE_OPTIMIZER.items() if kind in there - kept]


def _has_momentum(model: torch.nn.Module) -> bool:
    """Whether outer steps have momentum."""
    outer = engine_of(model).rounds
    return outer is not None and outer.settings.momentum > 0


def fitted_groups(
    source: Source, model: torch.nn.Module, listed: Sequence[TableRow]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each of the optimizers' param groups, with the hyper-parameters that its parameters have in the checkpoint."""
    hyper = _hyper_parameters(source)
    return [(group, hyper[min(names)] if names else {}) for group, names in _group_names(source, model, listed)]


def _hyper_parameters(source: Source) -> dict[str, dict[str, Any]]:
    """By parameter."""
    assert source.optimizer is not None
    by_name: dict[str, dict[str, Any]] = {}
    for group in source.optimizer.groups:
        values = {key: value for key, value in group.items() if key != "params"}
        by_name |= {source.resolve([name]) or name: values for name in group["params"]}
    return by_name


def _group_names(
    source: Source, model: torch.nn.Module, listed: Sequence[TableRow]
) -> list[tuple[dict[str, Any], frozenset[str]]]:
    """Each param group and its parameters, as the checkpoint names them."""
    numbered = engine_of(model).param_groups()
    names: dict[int, set[str]] = {number: set() for number, _ in numbered}
    for each in listed:
        if each.group in names:
            names[each.group].add(source.resolve(each.names) or each.name)
    return [(group, frozenset(names[number])) for number, group in numbered]


def _buffer_misfits(source: Source, model: torch.nn.Module, cast: bool) -> Iterator[str]:
    """What is wrong with the values of buffers that have the right shape."""
    for buffer in persistent_buffers(model):
        name = source.resolve(buffer.names)
        if name is None or source.tensors[name].shape != tuple(buffer.tensor.shape):
            continue
        states = source.tensors[name].states
        if (state := states.get(BUFFER) or states.get(WEIGHT)) is not None:
            yield from _misfit(_shown(name), state, source.tensors[name].numel, buffer.tensor.dtype, cast)


def _state_misfits(source: Source, model: torch.nn.Module, with_optimizer: bool, cast: bool) -> Iterator[str]:
    """What is wrong with the states of each parameter, seen from what they are to become."""
    averages = engine_of(model).averages if with_optimizer else ()
    averaged = {slot.name for bucket in averages for slot in bucket.slots}
    replica, momentum = engine_of(model).axes.replica, _has_momentum(model)
    for parameter in ModelState(model).parameters():
        if (name := source.resolve(parameter.names)) is None:
            continue
        info = source.tensors[name]
        if info.shape != parameter.shape:
            continue
        wanted: dict[str, tuple[int, torch.dtype | None]] = {WEIGHT: (parameter.numel, parameter.dtype)}
        there = {kind for kind in info.states if is_of_optimizer(kind) and not is_numbered(kind)}
        if parameter.name in averaged:
            wanted[AVERAGE] = (parameter.numel, parameter.dtype)
            if AVERAGE not in info.states and parameter.numel:  # of what has no elements none is saved
                yield f"{_shown(name)} has no average (load first, then make tz.EMA(model))"
        if with_optimizer and there and parameter.states is not None:
            yield from (f"{_shown(name)} has no {kind}" for kind in sorted(parameter.states.keys() - there))
            yield from (f"{_shown(name)} has {kind}, which this optimizer does not keep"
                        for kind in sorted(there - parameter.states.keys()))  # fmt: skip
            wanted.update(parameter.states)
            wanted.update((numbered(kind, replica), state) for kind, state in parameter.states.items())
        if with_optimizer:
            if momentum:
                wanted[OUTER_MOMENTUM] = (parameter.numel, torch.float32)
            residuals = [kind for kind in info.states if first_of(kind) in (RESIDUAL, RESIDUAL_OF_SUMS)]
            wanted.update(dict.fromkeys(residuals, (parameter.numel, RESIDUAL_DTYPE)))
        for kind, (numel, dtype) in wanted.items():
            if (state := info.states.get(kind)) is not None:
                yield from _misfit(f"{_shown(name)}, {kind}", state, numel, dtype, cast)


def _misfit(what: str, state: StateInfo, numel: int, dtype: torch.dtype | None, cast: bool) -> Iterator[str]:
    """`dtype` is None for a state that is not per element: it is one number, and becomes what it has to be."""
    if state.numel != numel:
        yield f"{what} has {state.numel} elements in the checkpoint, not {numel}"
    elif dtype is None:
        return
    elif state.dtype.is_floating_point != dtype.is_floating_point:
        yield f"{what} is {state.dtype} in the checkpoint and {dtype} here"
    elif not cast and not _holds(dtype, state.dtype):
        yield f"{what} is {state.dtype} in the checkpoint and {ROUNDED} to {dtype}"


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether every value of `other` is one of `dtype`."""
    if dtype == other:
        return True
    if not dtype.is_floating_point or not other.is_floating_point:
        return torch.promote_types(dtype, other) == dtype
    own, its = torch.finfo(dtype), torch.finfo(other)
    return own.max >= its.max and own.eps <= its.eps and own.smallest_normal <= its.smallest_normal


def _of_another_optimizer(source: Source, model: torch.nn.Module) -> str:
    saved, own = source.optimizer, optimizer_name(model)
    return f"its optimizer is {saved.name}, this one is {own}" if saved and saved.name and saved.name != own else ""


def _optimizer_misfits(source: Source, model: torch.nn.Module, listed: Sequence[TableRow]) -> Iterator[str]:
    saved = source.optimizer
    if saved is None:
        yield "; ".join(
            ["it holds no optimizer state (optimizer=None takes the weights alone)", *source.optimizer_notes]
        )
        return
    holder = scaler_of(model)
    for key in holder.scaler_state() if holder and saved.scaler else ():
        value = saved.scaler.get(key, math.nan)
        allowed = value > 0 if key == "scale" else value >= 0 or key == "patience"  # earlier releases let it sink
        if not (math.isfinite(value) and allowed):
            yield f"{key} of its loss scaler is {value if key in saved.scaler else 'missing'}"
    yield from _group_misfits(source, model, listed)


def _group_misfits(source: Source, model: torch.nn.Module, listed: Sequence[TableRow]) -> Iterator[str]:
    """Groups may be others, as long as each parameter finds its hyper-parameters again."""
    hyper = _hyper_parameters(source)
    for index, (current, names) in enumerate(_group_names(source, model, listed)):
        if absent := names - hyper.keys():
            yield f"{_shown(min(absent))} is in no parameter group of its optimizer"
            continue
        values = hyper[min(names)] if names else {}
        unlike = ((name, key) for name in sorted(names) for key in _unlike(hyper[name], values))
        if first := next(unlike, None):
            yield (
                f"parameter group {index} puts {_shown(min(names))} and {_shown(first[0])} together, which have"
                f" different {first[1]} in the checkpoint"
            )
        for key, value in values.items():
            if not _alike(value, current.get(key)):
                yield f"{key} of parameter group {index} is {value!r} in the checkpoint and {current.get(key)!r} here"


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Hyper-parameters that differ. One that is None is as good as missing."""
    return (key for key in {**other, **one} if one.get(key) != other.get(key))


def _alike(saved: Any, current: Any) -> bool:
    """Whether a saved hyper-parameter can take the place of the current one."""
    if isinstance(current, tuple | list):
        return isinstance(saved, tuple | list) and len(saved) == len(current) and all(map(_alike, saved, current))
    if current is None or isinstance(current, bool):
        return saved is None or isinstance(saved, bool if current is not None else bool | int | float)
    if isinstance(current, int | float | torch.Tensor):
        return isinstance(saved, int | float) and not isinstance(saved, bool)
    return type(saved) is type(current)


def _shown(name: str) -> str:
    """A name in which no two letters look alike."""
    return name if name.isascii() else ascii(name)
