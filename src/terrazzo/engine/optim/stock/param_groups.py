"""Param groups of a user's optimizers as a model is sharded: which owns each parameter, and which kernel steps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from terrazzo.engine.partition.unit_members import Member
from terrazzo.errors import BadInput
from terrazzo.optim import MatrixOptimizer

__all__ = ["assign_groups", "choose_kernel", "orphans", "take_fused"]


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
            "optimizer over model.parameters() of the model you shard, after what replaces parameters, such as "
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
        member.group = owned.get(id(member), member.group)


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
