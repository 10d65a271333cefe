"""What the engine asks of a stock `torch.optim` optimizer: how it updates, what its groups hold, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from terrazzo.engine.optim.settings import NOT_HYPER, STEP_HOOKS
from terrazzo.engine.plan.partition import Member
from terrazzo.errors import BadInput
from terrazzo.optim import MatrixOptimizer

__all__ = [
    "assign_groups",
    "choose_kernel",
    "hyper_parameters",
    "move_step_hooks",
    "orphans",
    "take_fused",
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
    stepped = [(number, parameter) for number, group in groups for parameter in group["params"]]
    if foreign := sum(parameter not in by_parameter for _, parameter in stepped):
        raise BadInput(
            f"{foreign} of the optimizer's {len(stepped)} parameters are not parameters of this model. Build the "
            "optimizer over model.parameters() of the model you shard, behind what replaces parameters, such as "
            "tz.parallelize."
        )
    owned: dict[int, int] = {}
    for number, parameter in stepped:
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
        member.assign_group(owned.get(id(member), member.group))


def hyper_parameters(optimizer: Optimizer) -> dict[str, float | Tensor]:
    """Every number in its param groups, by where it is; tensors of one element as they are."""
    settings = [(number, *item) for number, group in enumerate(optimizer.param_groups) for item in group.items()]
    entries = [(f"param_groups[{number}][{key!r}]", value) for number, key, value in settings if key not in NOT_HYPER]
    return {key: number for each in entries for key, number in _numbers(*each)}


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float | Tensor]]:
    if isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _numbers(f"{key}[{index}]", part)
    elif isinstance(value, int | float):
        yield key, float(value)
    elif isinstance(value, Tensor) and value.numel() == 1:
        yield key, value


def orphans(members: Sequence[Member]) -> list[str]:
    """Names of the trainable parameters that no optimizer has."""
    return [member.name for member in members if member.trainable and member.group < 0]


def choose_kernel(optimizer: Optimizer) -> None:
    """Take the fused kernel where the user has not chosen: it is faster than torch's default, on a CPU many times, and
    one kernel on every tier makes one result.
    """
    for group in optimizer.param_groups:
        if type(optimizer) in _FUSED or (isinstance(optimizer, MatrixOptimizer) and optimizer.may_be_fused(group)):
            take_fused(group)


def take_fused(group: dict[str, Any]) -> None:
    """Have a param group take the fused kernel, unless its settings are for another."""
    others = group.get("foreach") is not None or group.get("differentiable") or group.get("capturable")
    if group.get("fused") is None and not others:
        group["fused"] = True


_FUSED = (torch.optim.Adam, torch.optim.AdamW)
