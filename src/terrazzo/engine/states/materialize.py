"""Gives a unit's parameters and buffers real values, one unit at a time, equal on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.consensus.digest import digest
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.pipeline.absent_parameters import absent_in_place, readable
from terrazzo.engine.plan.partition import Member, UnitSpec
from terrazzo.errors import BadInput

__all__ = [
    "check_initializable",
    "initializer_of",
    "materialize",
    "materialize_buffers",
    "move_buffers",
    "replace_buffers",
    "step_real",
    "successor",
    "synchronize",
]

Initializer = Callable[[nn.Module, Collection[Tensor]], None]
"""Sets those of the given parameters, and those meta buffers, that a module itself owns, not those of its children."""


def initializer_of(model: nn.Module) -> Initializer:
    """How this model initialises one module: `reset_parameters`, then its own `_init_weights` as Hugging Face has.

    Call it before `materialize_buffers`: buffers that are real now keep their values. See `check_initializable`.
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
    """What is neither `fresh` nor without a value keeps it: initialising a module sets all that it owns.

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


def materialize(spec: UnitSpec, initialize: Initializer, axes: Axes) -> dict[nn.Parameter, nn.Parameter]:
    """Replace meta parameters by real ones, tied names together, and initialise the modules that hold them.

    What several ranks share is drawn whole and in the order of modules, on each of them, and then each keeps its part:
    the values do not depend on the mesh. What other ranks alone keep goes again. Their buffers are real by then: see
    `materialize_buffers`.

    Returns:
        What has come in whose place; equal on all ranks that have the same of it.
    """
    touched: dict[int, nn.Module] = {}
    fresh: list[tuple[Member, nn.Parameter]] = []
    for member in [*spec.members, *spec.drawn]:
        meta, holders = member.parameter, member.holders
        member.register()
        if not meta.is_meta:
            continue
        _replace(member, torch.empty(member.shape, dtype=meta.dtype, device=axes.device))
        fresh.append((member, meta))
        touched |= {id(module): module for module, _ in holders}
    order = {id(module): index for index, module in enumerate(spec.module.modules())}
    for module in sorted(touched.values(), key=lambda module: order.get(id(module), len(order))):
        with readable(module):
            initialize(module, {member.parameter for member, _ in fresh})
    own = fresh[: len(fresh) - len(spec.drawn)]
    for parameters, attribute in (each for member in spec.drawn for each in member.registered):
        parameters[attribute] = None
    synchronize([member.parameter for member, _ in own], axes)
    for member, _ in own:
        if member.record is not None:
            _replace(member, member.record.box.of(member.parameter.detach()))
    return {meta: member.parameter for member, meta in own}


def _replace(member: Member, value: Tensor) -> None:
    """Register a parameter of that value under all names of the old one."""
    parameter = successor(member.parameter, value)
    vars(parameter).pop("_is_hf_initialized", None)  # it has to be
    member.replace(parameter)


def successor(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter of that value with the class, attributes and hooks of another one."""
    made = nn.Parameter(value, requires_grad=old.requires_grad)
    made.__class__ = type(old)
    vars(made).update(vars(old))
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (registered := getattr(old, hooks)) is not None:
            setattr(made, hooks, registered)  # the same dictionary: handles of users can remove them
    return made


def step_real(optimizer: Optimizer, made: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Have an optimizer that was built over meta parameters step those that have come in their place."""
    for group in optimizer.param_groups:
        group["params"] = [made.get(parameter, parameter) for parameter in group["params"]]


def materialize_buffers(model: nn.Module, device: torch.device) -> list[nn.Module]:
    """Replace meta buffers by real ones of zeros, those that modules share together.

    Returns:
        The modules that had any and that no parameter will have initialised.
    """
    with absent_in_place(model) as away:  # what other stages have is drawn here, too, and the buffers beside it
        bare = [module for module in model.modules() if _on_meta(module._buffers) and not _will_be_drawn(module, away)]
    replace_buffers(model, lambda buffer: torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer)
    return bare


def move_buffers(model: nn.Module, axes: Axes) -> None:
    """Bring every buffer to the device, those that modules share together, with the first rank's values."""
    replace_buffers(model, lambda buffer: buffer.to(axes.device))
    synchronize(list(model.buffers()), axes)


def _will_be_drawn(module: nn.Module, away: Mapping[nn.Parameter, bool]) -> bool:
    """Whether it has parameters of its own that are still to be given their first values; of those away as told."""
    return any(each is not None and each.is_meta and away.get(each, True) for each in module._parameters.values())


def _on_meta(tensors: Mapping[str, Tensor | None]) -> bool:
    return any(tensor is not None and tensor.is_meta for tensor in tensors.values())


def replace_buffers(model: nn.Module, replaced: Callable[[Tensor], Tensor]) -> None:
    """Put `replaced(buffer)` in the place of each buffer, one for all modules that hold it."""
    made: dict[Tensor, Tensor] = {}  # by identity
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer not in made:
                    made[buffer] = replaced(buffer)
                module._buffers[name] = made[buffer]


def synchronize(tensors: Sequence[Tensor], axes: Axes, along: tuple[str, ...] | None = None) -> None:
    """Make `tensors` equal along all axes, or those of `along`: those that differ take the first rank's values."""
    over = axes.of_stage if along is None else along
    if not axes.live(over) or not tensors:
        return
    by_number = {str(number): tensor for number, tensor in enumerate(tensors)}
    for number in axes.differing({number: digest(tensor) for number, tensor in by_number.items()}, over):
        value = by_number[number].detach().to(axes.device).contiguous()
        axes.broadcast(value, over)
        with torch.no_grad():
            by_number[number].copy_(value)
