"""First values of a model on the meta device: given one unit at a time, equal on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.buckets.parameters.gradient_hooks import successor
from terrazzo.engine.consensus.equal_values import synchronize
from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.partition.absent_parameters import absent_in_place, readable
from terrazzo.engine.partition.unit_members import Member, UnitSpec
from terrazzo.engine.states.buffers_and_extra_state import replace_buffers
from terrazzo.errors import BadInput
from terrazzo.messages import listed

__all__ = ["InitialValues", "check_initializable", "move_buffers"]

Initializer = Callable[[nn.Module, Collection[Tensor]], None]
"""Sets those of the given parameters, and those meta buffers, that a module itself owns, not those of its children."""


class _Place(NamedTuple):
    """Place where a module holds a buffer: the dictionary, the buffer's name in the model, and the module's class."""

    tensors: dict[str, Any]
    attribute: str
    name: str
    kind: str


class InitialValues:
    """First values of the meta parameters of one model, given unit by unit, and then of its buffers.

    Until a module sets them, floating tensors are NaN, and others have a value that no module sets: what a module
    forgets is found, and never trained.

    Attributes:
        made: what has come in place of each meta parameter.
    """

    def __init__(self, model: nn.Module, axes: Axes) -> None:
        self._model, self._axes = model, axes
        self._initialize = _initializer_of(model)
        self._own_init = type(model).__name__ if callable(getattr(model, "_init_weights", None)) else ""
        self._forgotten: list[tuple[str, str]] = []  # names, and the classes of the modules that hold them
        self.made: dict[nn.Parameter, nn.Parameter] = {}
        self._buffers = [
            _Place(module._buffers, attribute, f"{path}.{attribute}" if path else attribute, type(module).__name__)
            for path, module in model.named_modules()
            for attribute, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta
        ]
        self._bare = _modules_with_buffers_alone(model)
        replace_buffers(model, lambda buffer: _unset(buffer, axes.device) if buffer.is_meta else buffer)

    def draw(self, spec: UnitSpec) -> Collection[nn.Parameter]:
        """Replace a unit's meta parameters by real ones, tied names together, and initialise what holds them.

        What several ranks share is drawn whole on each of them, and then each keeps its part. Units come one after the
        other, the root first, and the modules of each in their order: the values do not depend on the mesh, but other
        units give other values. A tied parameter has the values that the module of its first name gives it. Parameters
        that only other ranks have are drawn for what comes after them, and then dropped.

        Returns:
            The new parameters; equal on all ranks that have the same of them.
        """
        fresh = [(member, member.parameter) for member in (*spec.members, *spec.drawn) if member.parameter.is_meta]
        for member, meta in fresh:
            _replace(member, _unset(torch.empty(member.shape, dtype=meta.dtype, device="meta"), self._axes.device))
        touched = {id(parameters) for member, _ in fresh for parameters, _ in member.registered}
        for module in spec.module.modules():  # the unit is around all that have one of its parameters
            if id(module._parameters) in touched:
                its_own = (member for member, _ in fresh if member.registered[0][0] is module._parameters)
                with readable(module):
                    self._initialize(module, {member.parameter for member in its_own})
        own = fresh[: len(fresh) - len(spec.drawn)]
        for parameters, attribute in (each for member in spec.drawn for each in member.registered):
            parameters[attribute] = None
        synchronize([member.parameter for member, _ in own], self._axes, self._axes.within_stage)
        self._forgotten += [(each.name, each.kinds[0].__name__) for each, _ in own if _is_unset(each.parameter)]
        for member, _ in own:
            if member.record is not None:
                _replace(member, member.record.box.of(member.parameter.detach()))
        self.made |= {meta: member.parameter for member, meta in own}
        return {member.parameter for member, _ in own}

    def finish(self) -> None:
        """Initialise modules that have buffers alone, and bring all buffers to the device. Collective.

        Raises:
            BadInput: on every rank, where modules have left any of their parameters or buffers without a value.
        """
        for module in self._bare:
            self._initialize(module, ())
        move_buffers(self._model, self._axes)
        for place in self._buffers:
            if (buffer := place.tensors.get(place.attribute)) is not None and _is_unset(buffer):
                self._forgotten.append((place.name, place.kind))
        all_or_none(self._axes, self._refuse_forgotten)

    def _refuse_forgotten(self) -> None:
        if not self._forgotten:
            return
        kinds = sorted({kind for _, kind in self._forgotten})
        own = f", or _init_weights() of {self._own_init}" if self._own_init else ""
        raise BadInput(
            f"The model was built on the meta device, and {listed([repr(name) for name, _ in self._forgotten], 5)} got "
            f"no value, or not everywhere: reset_parameters() of {', '.join(kinds)}{own} must set every parameter and "
            "buffer that the module owns. Complete it, or build the model on a real device. This model cannot be used."
        )

    def hand_to(self, optimizer: Optimizer) -> None:
        """Have an optimizer that was built over meta parameters step those that have come in their place."""
        for group in optimizer.param_groups:
            group["params"] = [self.made.get(parameter, parameter) for parameter in group["params"]]


def _initializer_of(model: nn.Module) -> Initializer:
    """Return what initialises one module of a model: `reset_parameters`, then the model's `_init_weights`, if any.

    Call it while buffers are on the meta device: those that are real now keep their values.
    """
    own = getattr(model, "_init_weights", None)
    loaded = {buffer for buffer in model.buffers() if not buffer.is_meta}

    def initialize(module: nn.Module, fresh: Collection[Tensor]) -> None:
        with _left_alone(module, fresh, loaded):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
            if callable(own):
                own(module)

    return initialize


@contextlib.contextmanager
def _left_alone(module: nn.Module, fresh: Collection[Tensor], loaded: Collection[Tensor]) -> Iterator[None]:
    """Keep the values of what is neither `fresh` nor without one: initialising a module sets all that it owns.

    In the place of such parameters are meta ones, since their values may be on other ranks; of buffers, copies.
    """
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter not in fresh:
            replaced.append((module._parameters, name, parameter))
            away = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            module._parameters[name] = nn.Parameter(away, requires_grad=parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer in loaded:
            replaced.append((module._buffers, name, buffer))
            module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for tensors, name, tensor in replaced:
            tensors[name] = tensor


def check_initializable(model: nn.Module) -> None:
    """Refuse meta parameters or buffers in a module that has no way to initialise them.

    Raises:
        BadInput: there.
    """
    if callable(getattr(model, "_init_weights", None)):
        return
    for module in model.modules():
        meta = _on_meta(module._parameters) or _on_meta(module._buffers)
        if meta and not callable(getattr(module, "reset_parameters", None)):
            raise BadInput(
                f"{type(module).__name__} was built on the meta device and has no reset_parameters() to give its "
                "parameters and buffers values. Add that method, or build the model on a real device."
            )


def move_buffers(model: nn.Module, axes: Axes) -> None:
    """Bring every buffer to the device, those that modules share together, with the first rank's values."""
    replace_buffers(model, lambda buffer: buffer.to(axes.device))
    synchronize(list(model.buffers()), axes, axes.within_stage)


def _replace(member: Member, value: Tensor) -> None:
    """Register a parameter of that value under all names of the old one."""
    parameter = successor(member.parameter, value)
    vars(parameter).pop("_is_hf_initialized", None)  # it has to be
    member.replace(parameter)


def _modules_with_buffers_alone(model: nn.Module) -> list[nn.Module]:
    """Modules with meta buffers, no parameter of which is still to be given its first value."""
    with absent_in_place(model) as away:  # what other stages have is drawn here, too, and the buffers beside it
        return [module for module in model.modules() if _on_meta(module._buffers) and not _will_be_drawn(module, away)]


def _will_be_drawn(module: nn.Module, away: Mapping[nn.Parameter, bool]) -> bool:
    """Whether a module has parameters that are still to be given first values; `away` says so of those elsewhere."""
    return any(each is not None and each.is_meta and away.get(each, True) for each in module._parameters.values())


def _on_meta(tensors: Mapping[str, Tensor | None]) -> bool:
    return any(tensor is not None and tensor.is_meta for tensor in tensors.values())


_UNSET_BYTE = 0xA5
"""Byte of a bool without a value; those with one are 0 or 1."""


def _unset_integer(dtype: torch.dtype) -> int:
    """An integer that fills no tensor of that dtype: neither a default, nor a limit, nor a count."""
    return torch.iinfo(dtype).max - 90


def _unset(like: Tensor, device: torch.device) -> Tensor:
    """Memory of that shape and dtype without a value: `_is_unset` tells it from what has one."""
    made = torch.empty_like(like, device=device)
    if made.is_floating_point() or made.is_complex():
        return made.fill_(float("nan"))
    if made.dtype == torch.bool:
        made.view(torch.uint8).fill_(_UNSET_BYTE)
        return made
    return made.fill_(_unset_integer(made.dtype))


def _is_unset(values: Tensor) -> bool:
    """Whether any element of a floating tensor has no value yet; of a tensor of integers, whether all have none."""
    values = values.detach()
    if not values.numel():
        return False
    if values.dtype == torch.bool:
        return bool((values.view(torch.uint8) == _UNSET_BYTE).all())
    if not (values.is_floating_point() or values.is_complex()):
        return bool((values == _unset_integer(values.dtype)).all())
    real = torch.view_as_real(values) if values.is_complex() else values
    return bool((real if real.itemsize > 1 else real.float()).max().isnan())  # without a mask of so many bytes
