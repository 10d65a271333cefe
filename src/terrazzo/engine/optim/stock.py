"""What the engine asks of a stock `torch.optim` optimizer: how it updates, what its groups hold, and what it keeps."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrazzo.engine.optim.settings import NOT_HYPER, STEP_HOOKS, Settings, frozen
from terrazzo.engine.plan.partition import Member
from terrazzo.errors import BadInput

__all__ = [
    "ELEMENTWISE",
    "PROBE_NUMEL",
    "StateSpec",
    "Templates",
    "assign_groups",
    "bare_copy",
    "check_elementwise",
    "check_optimizer",
    "choose_kernel",
    "hyper_parameters",
    "move_step_hooks",
    "orphans",
    "state_of",
    "unhooked_step",
]

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
)
"""Optimizers whose update of an element depends on that element's own values alone: correct on any flat shard."""


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """One of its class with its states, and attributes of its own; it knows nothing of the model and has no hooks."""
    copied = object.__new__(type(optimizer))  # copy.copy would drop attributes that are not in its __getstate__
    ties = ("_driver", "step")  # they lead to the model
    copied.__dict__.update({key: value for key, value in vars(optimizer).items() if key not in ties})
    copied.__dict__.update({key: OrderedDict() for key in STEP_HOOKS})  # so do these, and a base class's step asks
    copied.__dict__.update(Settings(copied).attributes)
    return copied


def move_step_hooks(optimizer: Optimizer, last_before: int, first_after: int) -> None:
    """Call the hook of one number last before each step, and that of another first after it."""
    before, after = (vars(optimizer)[name] for name in STEP_HOOKS)
    before.move_to_end(last_before)
    after.move_to_end(first_after, last=False)


def unhooked_step(optimizer: Optimizer) -> None:
    """The optimizer class's own update, without step hooks, profiling or a scheduler's wrapper."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def check_elementwise(optimizer: Optimizer | type[Optimizer]) -> None:
    """Refuse an optimizer, or a class of them, that is not known to update each element from its own values alone.

    Raises:
        BadInput: there.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not (kind in ELEMENTWISE or getattr(optimizer, "elementwise", False)):
        raise BadInput(
            f"{kind.__name__} cannot run on flat shards: it is not known to update each element from that element's "
            "values alone (Adafactor, Muon, LBFGS and Shampoo do not). Use one of "
            f"{', '.join(sorted(known.__name__ for known in ELEMENTWISE))}, or set 'elementwise = True' on your "
            "optimizer class if its update is elementwise."
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot be sharded element by element.

    Raises:
        BadInput: what is no optimizer, is not known to be elementwise, or has states without values.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise BadInput(f"optimizer is a {name}; pass a torch.optim.Optimizer (to tz.shard also what builds one).")
    check_elementwise(optimizer)
    if any(isinstance(value, Tensor) and value.is_meta for kept in optimizer.state.values() for value in kept.values()):
        raise BadInput(
            f"This {name} made its states as it was built, over parameters on the meta device, so that they have no "
            "values. Build the model on a real device for it, or take an optimizer that makes them in its first step, "
            "such as RMSprop or Adam."
        )


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


def state_of(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> dict[str, StateSpec]:
    """What this optimizer keeps for each parameter of `group`.

    Taken from a parameter that has state already, else found by stepping a tensor of a few elements on a zero gradient.

    Args:
        device: of the mesh. Where a state lives may follow the parameter, which is not there yet: a fused kernel reads
            `step` on the device, so its place is found there, whatever state there is.
    """
    probed = _probe(optimizer, group, device)
    for parameter in group["params"]:
        if parameter.dim() and (state := optimizer.state.get(parameter)):
            specs = _specs(state, parameter.shape)
            return {key: replace(spec, device=probed.get(key, spec).device) for key, spec in specs.items()}
    return probed


PROBE_NUMEL = 13
"""Elements of a tensor that is stepped to see what an optimizer keeps: no number that it would keep for all of them."""


def _probe(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> dict[str, StateSpec]:
    tensor = nn.Parameter(torch.zeros(PROBE_NUMEL, device=device))
    tensor.grad = torch.zeros_like(tensor)
    probe = bare_copy(optimizer)
    probe.state = defaultdict(dict)
    probe.param_groups = [{**frozen({**group, "params": None}), "params": [tensor]}]
    unhooked_step(probe)
    return _specs(probe.state[tensor], tensor.shape)


def _specs(state: Mapping[str, Any], shape: torch.Size) -> dict[str, StateSpec]:
    specs = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            specs[key] = StateSpec(per_element=False, kind=type(value))
        else:
            specs[key] = StateSpec(value.shape == shape, tuple(value.shape), value.dtype, value.device)
    return specs
