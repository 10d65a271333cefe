"""What the engine asks of a stock `torch.optim` optimizer: how it updates, what its groups hold, and what it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.optim.settings import NOT_HYPER, STEP_HOOKS
from terrazzo.engine.optim.stepper import Stepper
from terrazzo.engine.plan.partition import Member
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput

__all__ = [
    "PROBE_NUMEL",
    "Start",
    "StateSpec",
    "Templates",
    "assign_groups",
    "choose_kernel",
    "hyper_parameters",
    "move_step_hooks",
    "orphans",
    "start_of",
    "state_of",
    "undrawn",
]


def move_step_hooks(optimizer: Optimizer, last_before: int, first_after: int) -> None:
    """Call the hook of one number last before each step, and that of another first after it."""
    before, after = (vars(optimizer)[name] for name in STEP_HOOKS)
    before.move_to_end(last_before)
    after.move_to_end(first_after, last=False)


def assign_groups(optimizers: Sequence[Optimizer], members: Sequence[Member], first: int = 0) -> None:
    """Note on each member which param group owns it, counting those of all optimizers on from `first`.

    Raises:
        BadInput: with nothing noted, for parameters that are not the model's or have an optimizer already.
    """
    by_parameter = {member.parameter: member for member in members}
    groups = enumerate((group for each in optimizers for group in each.param_groups), first)
    given = [(number, parameter) for number, group in groups for parameter in group["params"]]
    if foreign := sum(parameter not in by_parameter for _, parameter in given):
        raise BadInput(
            f"{foreign} of the optimizer's {len(given)} parameters are not parameters of this model. Build the "
            "optimizer over model.parameters() of the model you shard, after any step that replaces parameters."
        )
    owned: dict[int, int] = {}
    for number, parameter in given:
        member = by_parameter[parameter]
        if member.group >= 0 or id(member) in owned:
            replacing = (
                " To put another in the place of one that it has, drop all references to that, 'del optimizer', or"
                " call terrazzo.engine.engine_of(model).release_optimizer(), which lets go of all."
            )
            raise BadInput(
                f"{member.name!r} is in two optimizers of this model, and a parameter has one: build them over "
                "disjoint parameters, such as model.generator.parameters() and model.discriminator.parameters()."
                + (replacing if member.group >= 0 else "")
            )
        owned[id(member)] = number
    for member in members:
        member.group = owned.get(id(member), member.group)


def hyper_parameters(optimizer: Optimizer) -> dict[str, float]:
    """Every number in its param groups, by where it is; 0 for one on a device, which the host would wait for."""
    held = [(number, *item) for number, group in enumerate(optimizer.param_groups) for item in group.items()]
    places = [(f"param_groups[{number}][{key!r}]", value) for number, key, value in held if key not in NOT_HYPER]
    return {place: number for each in places for place, number in _numbers(*each)}


def _numbers(place: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _numbers(f"{place}[{index}]", part)
    elif isinstance(value, int | float):
        yield place, float(value)
    elif isinstance(value, Tensor) and value.numel() == 1:
        yield place, float(value) if value.is_cpu else 0.0


def orphans(members: Sequence[Member]) -> list[str]:
    """Names of the trainable parameters that no optimizer has."""
    return [member.name for member in members if member.trainable and member.group < 0]


@dataclass(frozen=True)
class StateSpec:
    """What an optimizer keeps for a parameter under one key.

    Attributes:
        per_element: one value per element of the parameter, in the dtype of moments; else of the shape that follows.
        device: where it lives for a parameter on the mesh's device.
        kind: Tensor, or the Python type of a plain number.
    """

    per_element: bool
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    kind: type = Tensor

    @property
    def fixed_bytes(self) -> int:
        """Memory of a state that is not per element."""
        return math.prod(self.shape) * self.dtype.itemsize if self.kind is Tensor and not self.per_element else 0

    def restored(self, flat: Tensor, device: torch.device | None) -> Any:
        """`flat` as the optimizer expects it for a parameter on `device`."""
        if self.kind is not Tensor:
            return self.kind(flat.item())
        on_cpu = self.device is None or self.device.type == "cpu"
        return flat.to(device=self.device if on_cpu else device, dtype=self.dtype).reshape(self.shape).clone()


Templates = Sequence[Mapping[str, StateSpec]]
"""What an optimizer keeps for a parameter of each param group."""


def choose_kernel(optimizer: Optimizer) -> None:
    """Take the fused kernel where the user has not chosen: it is faster than torch's default, on a CPU many times, and
    one kernel on every tier makes one result.
    """
    for group in optimizer.param_groups:
        taken = group.get("foreach") is not None or group.get("differentiable") or group.get("capturable")
        if type(optimizer) in _FUSED and group.get("fused") is None and not taken:
            group["fused"] = True


_FUSED = (torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class Start:
    """What a probe of an optimizer begins with.

    Attributes:
        numel: elements of the tensor that is stepped.
        state: kept for it, flat where there is a value for each element.
    """

    numel: int
    state: Mapping[str, Any]

    def per_element(self, value: Any) -> bool:
        """Whether `value` has one value for each element."""
        return isinstance(value, Tensor) and value.shape == (self.numel,)


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def undrawn(device: torch.device) -> AbstractContextManager[None]:
    """The random generators are afterwards as they were."""
    return torch.random.fork_rng(devices=[device] if devices.is_cuda(device) else [])


def start_of(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> Start:
    """Nothing, but for an optimizer of a user's own that has made states already: its first elements of a parameter.

    Torch's classes make theirs in a step. One that makes them as it is built may not know how to go on without.
    """
    parameter, state = (None, {}) if _is_torchs(optimizer) else _with_state(optimizer, group)
    if parameter is None:
        return Start(PROBE_NUMEL, {})
    numel = min(PROBE_NUMEL, parameter.numel())

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return (value.flatten()[:numel] if value.shape == parameter.shape else value).to(device, copy=True)

    return Start(numel, {key: part(value) for key, value in state.items()})


def state_of(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> dict[str, StateSpec]:
    """What this optimizer keeps for each parameter of `group`.

    Taken from a parameter that has state already, else found by stepping a tensor of a few elements on a zero gradient.

    Args:
        device: of the mesh. Where a state lives may follow the parameter, which is not there yet: a fused kernel reads
            `step` on the device, so its place is found there, whatever state there is.
    """
    start = start_of(optimizer, group, device)
    tensor = nn.Parameter(torch.zeros(start.numel, device=device))
    tensor.grad = torch.zeros_like(tensor)
    number = next(i for i, each in enumerate(optimizer.param_groups) if each is group)
    with nullcontext() if _is_torchs(optimizer) else undrawn(device):
        probed = _specs(Stepper(optimizer).step(number, tensor, start.state), tensor.shape)
    parameter, state = _with_state(optimizer, group)
    if parameter is None:
        return probed
    specs = _specs(state, parameter.shape)
    return {key: replace(spec, device=probed.get(key, spec).device) for key, spec in specs.items()}


PROBE_NUMEL = 13
"""Elements of a tensor that is stepped to see what an optimizer keeps: no number that it would keep for all of them."""


def _with_state(optimizer: Optimizer, group: dict[str, Any]) -> tuple[Tensor | None, Mapping[str, Any]]:
    """The first parameter with state that has a shape, and that."""
    for parameter in group["params"]:
        if parameter.dim() and (state := optimizer.state.get(parameter)):
            return parameter, state
    return None, {}


def _specs(state: Mapping[str, Any], shape: torch.Size) -> dict[str, StateSpec]:
    specs = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            specs[key] = StateSpec(per_element=False, kind=type(value))
        else:
            specs[key] = StateSpec(value.shape == shape, tuple(value.shape), value.dtype, value.device)
    return specs
