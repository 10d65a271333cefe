"""First values of a model on the meta device: given one unit at a time, equal on every rank."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.buckets.parameters.gradient_hooks import successor
from terrazzo.engine.consensus.equal_values import synchronize
from terrazzo.engine.consensus.joint_checks import all_or_none
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.partition.absent_parameters import absent_in_place
from terrazzo.engine.partition.unit_members import Member, UnitSpec
from terrazzo.engine.sharding.initializers import Initializer, initializers_of, on_meta
from terrazzo.engine.sharding.unset_values import is_unset, unset
from terrazzo.engine.states.buffers_and_extra_state import replace_buffers
from terrazzo.errors import BadInput
from terrazzo.messages import listed, warn

__all__ = ["InitialValues", "move_buffers"]


class _Place(NamedTuple):
    """Place where a module holds a buffer: the dictionary, the buffer's name in the model, and what is to set it."""

    tensors: dict[str, Any]
    attribute: str
    name: str
    initializer: Initializer


class _Meta(nn.Parameter):
    """A meta parameter in the place of one that is not to be set now; its version tells whether something has."""

    @property
    def data(self) -> Tensor:
        """The tensor without its gradient, whose changes count, unlike those of what torch calls so."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            self.zero_()


class _StandIn(NamedTuple):
    """A place where a module `holder` has a `_Meta` parameter, in the place of one that is drawn at another time."""

    name: str
    holder: nn.Module
    attribute: str
    value: _Meta

    @property
    def version(self) -> int:
        """Another one than before where something has set it, or put another parameter in its place."""
        return self.value._version if self.holder._parameters.get(self.attribute) is self.value else -1


class InitialValues:
    """First values of the meta parameters of one model, given unit by unit, and then of its buffers.

    Until a module sets them, floating tensors are NaN, and others have a value that no module sets: what a module
    forgets is found, and never trained.

    Args:
        specs: the units of the whole model.

    Attributes:
        made: what has come in place of each meta parameter.
    """

    def __init__(self, model: nn.Module, axes: Axes, specs: Sequence[UnitSpec]) -> None:
        self._model, self._axes = model, axes
        self._initializers = _of_what_is_on_meta(model, {spec.module for spec in specs})
        self._by_parameters = {id(each.module._parameters): each for each in self._initializers}
        self._called: set[Initializer] = set()
        self._loaded = {tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
        self._forgotten: list[tuple[str, Initializer]] = []  # names, and what should have set them
        self._lost: dict[Initializer, dict[str, None]] = {}  # names of children's parameters that it has set in vain
        self.made: dict[nn.Parameter, nn.Parameter] = {}
        self._buffers = [
            _Place(each.module._buffers, attribute, f"{each.name}.{attribute}" if each.name else attribute, each)
            for each in self._initializers
            for attribute, buffer in each.module._buffers.items()
            if buffer is not None and buffer.is_meta
        ]
        replace_buffers(model, lambda buffer: unset(buffer, axes.device) if buffer.is_meta else buffer)

    def draw(self, spec: UnitSpec) -> Collection[nn.Parameter]:
        """Replace a unit's meta parameters by real ones, tied names together, and initialise what holds them.

        What several ranks share is drawn whole on each of them, and then each keeps its part. Units come one after the
        other, the root first, and the modules of each in the order of constructors, children first: the values do not
        depend on the mesh, but other units give other values. A tied parameter has the values that the module of its
        first name gives it. Parameters that only other ranks have are drawn for what comes after them, and then
        dropped.

        Returns:
            The new parameters; equal on all ranks that have the same of them.
        """
        own = [(member, member.parameter) for member in spec.members if member.parameter.is_meta]
        others = [(member, member.parameter) for member in spec.drawn]
        with absent_in_place(spec.module):
            for member, meta in (*own, *others):
                _replace(member, unset(torch.empty(member.shape, dtype=meta.dtype, device="meta"), self._axes.device))
            self._initialise(spec, [member.registered[0] for member, _ in (*own, *others)])
            for member, meta in others:
                member.replace(meta)
        synchronize([member.parameter for member, _ in own], self._axes, self._axes.within_stage)
        for member, meta in own:
            if is_unset(member.parameter):
                self._forgotten.append((member.name, self._by_parameters[id(member.registered[0][0])]))
            if member.record is not None:
                _replace(member, member.record.box.of(member.parameter.detach()))
            self.made[meta] = member.parameter
        return {member.parameter for member, _ in own}

    def _initialise(self, spec: UnitSpec, fresh: Sequence[tuple[dict[str, Any], str]]) -> None:
        """Have the unit's own modules set what is fresh in it, and those of units inside what is tied."""
        holders = {id(parameters) for parameters, _ in fresh}
        self._call(
            spec.name,
            spec.module,
            [each for each in self._initializers if each.unit is spec.module or id(each.module._parameters) in holders],
            {(id(parameters), attribute) for parameters, attribute in fresh},
        )

    def _call(
        self, name: str, module: nn.Module, initializers: Sequence[Initializer], fresh: Collection[tuple[int, str]] = ()
    ) -> None:
        """Call these, all in the module of that name, for parameters in `fresh` places and buffers without values."""
        if not initializers:  # as in a model with all its values, of which nothing has to be put away
            return
        with _left_alone(name, module, fresh, self._loaded) as stand_ins:
            for call, each in itertools.product((Initializer.construct, Initializer.initialize), initializers):
                before = [stand_in.version for stand_in in stand_ins]
                call(each)
                self._called.add(each)
                for stand_in, version in zip(stand_ins, before, strict=True):
                    if stand_in.version != version and stand_in.holder is not each.module:
                        self._lost.setdefault(each, {})[stand_in.name] = None

    def finish(self) -> None:
        """Initialise modules whose unit has had nothing to draw, and bring all buffers to the device. Collective.

        Raises:
            BadInput: on every rank, where modules have left any of their parameters or buffers without a value.
        """
        self._call("", self._model, [each for each in self._initializers if each not in self._called])
        move_buffers(self._model, self._axes)
        for place in self._buffers:
            if (buffer := place.tensors.get(place.attribute)) is not None and is_unset(buffer):
                self._forgotten.append((place.name, place.initializer))
        all_or_none(self._axes, self._refuse_forgotten)
        self._warn_of_loaded()
        for each, names in self._lost.items():
            whose = f"{type(each.module).__name__} {each.name!r}" if each.name else type(each.module).__name__
            warn(
                f"What {whose} sets of {listed([*map(repr, names)], 3)} is lost, since they are drawn with other units "
                "than its own: they have what their own modules give them. Name units that have it whole, or build the "
                "model on a real device."
            )

    def _warn_of_loaded(self) -> None:
        kept = [repr(name) for name, parameter in self._model.named_parameters() if parameter in self._loaded]
        if self.made and kept:
            warn(
                f"The model was built on the meta device, but for {listed(kept, 3)}: the values that these have are "
                "kept, and the others are drawn. Where they have none yet, call model.to('meta') first: "
                "torch.Tensor(sizes) heeds no device, and gives memory as it was found."
            )

    def _refuse_forgotten(self) -> None:
        if not self._forgotten:
            return
        kinds = sorted({type(each.module).__name__ for _, each in self._forgotten})
        owners = sorted({type(each.owner).__name__ for _, each in self._forgotten if each.owner is not None})
        or_owner = f", or _init_weights() of {', '.join(owners)}" if owners else ""
        raise BadInput(
            f"The model was built on the meta device, and {listed([repr(name) for name, _ in self._forgotten], 5)} got "
            f"no value, or not everywhere: reset_parameters() of {', '.join(kinds)}{or_owner} must set every parameter "
            "and buffer that the module owns. Complete it, or build the model on a real device. This model cannot be "
            "used."
        )

    def hand_to(self, optimizer: Optimizer) -> None:
        """Have an optimizer that was built over meta parameters step those that have come in their place."""
        for group in optimizer.param_groups:
            group["params"] = [self.made.get(parameter, parameter) for parameter in group["params"]]


def _of_what_is_on_meta(model: nn.Module, units: Collection[nn.Module]) -> list[Initializer]:
    """The initializers of modules with anything that is to be given first values, in themselves or below."""
    found: dict[nn.Module, Initializer] = {}
    with absent_in_place(model) as elsewhere:  # what other stages have is drawn here, too, and the buffers beside it
        for each in initializers_of(model, units):
            own = (parameter for parameter in each.module._parameters.values() if parameter is not None)
            coming = any(parameter.is_meta and elsewhere.get(parameter, True) for parameter in own)
            if coming or on_meta(each.module._buffers) or any(child in found for child in each.module.children()):
                found[each.module] = each
    return [*found.values()]


@contextlib.contextmanager
def _left_alone(
    name: str, root: nn.Module, fresh: Collection[tuple[int, str]], loaded: Collection[Tensor]
) -> Iterator[list[_StandIn]]:
    """Keep the values of what is neither `fresh` nor without one: initialising a module sets all that it owns.

    In the place of such parameters are meta ones, since their values may be on other ranks; of buffers, copies.

    Args:
        name, root: the module around all that is initialised.
        fresh: places of parameters: the identity of a module's dictionary of them, and the attribute.

    Gives what stands for parameters that are drawn at another time.
    """
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    stand_ins: list[_StandIn] = []
    for path, module in root.named_modules(prefix=name):
        for attribute, parameter in module._parameters.items():
            if parameter is not None and (id(module._parameters), attribute) not in fresh:
                replaced.append((module._parameters, attribute, parameter))
                away = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                value = module._parameters[attribute] = _Meta(away, requires_grad=parameter.requires_grad)
                if parameter not in loaded:
                    stand_ins.append(_StandIn(f"{path}.{attribute}" if path else attribute, module, attribute, value))
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer in loaded:
                replaced.append((module._buffers, attribute, buffer))
                module._buffers[attribute] = buffer.clone()
    try:
        yield stand_ins
    finally:
        for tensors, name, tensor in replaced:
            tensors[name] = tensor


def move_buffers(model: nn.Module, axes: Axes) -> None:
    """Bring every buffer to the device, those that modules share together, with the first rank's values."""
    replace_buffers(model, lambda buffer: buffer.to(axes.device))
    synchronize(list(model.buffers()), axes, axes.within_stage)


def _replace(member: Member, value: Tensor) -> None:
    """Register a parameter of that value under all names of the old one."""
    parameter = successor(member.parameter, value)
    vars(parameter).pop("_is_hf_initialized", None)  # it has to be
    member.replace(parameter)
