"""Checks of the optimizers that a model gets, as it is sharded or later, and what they keep for a parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from terrazzo.engine.buckets.bucket_layout import BucketLayout
from terrazzo.engine.optim.stock.elementwise import check_narrow, check_optimizer, check_zeros
from terrazzo.engine.optim.stock.param_groups import assign_groups
from terrazzo.engine.optim.stock.probe import OptimizerProbe
from terrazzo.engine.optim.stock.template import Templates
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.plan.diloco import DiLoCo
from terrazzo.engine.plan.precision import DTYPE_NAMES, Precision
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.sharding.matrix_checks import check_matrices
from terrazzo.engine.states.given_states import warn_of_unstepped
from terrazzo.errors import BadInput
from terrazzo.messages import warn

__all__ = ["assign_checked", "checked_templates", "templates_of"]


def assign_checked(
    optimizers: Sequence[Optimizer], members: Sequence[Member], device: torch.device, first: int = 0
) -> None:
    """Note on each member which param group owns it, as `assign_groups` does, of optimizers that can be sharded.

    Warns of states of frozen parameters, before anything is changed: where warnings are errors, nothing has been.

    Raises:
        BadInput: as of `check_optimizer` and `assign_groups`.
    """
    for each in optimizers:
        check_optimizer(each, device)
    assign_groups(optimizers, members, first)
    frozen = [member for member in members if not member.parameter.requires_grad]
    for each in optimizers:
        warn_of_unstepped({m.name: each.state[m.parameter] for m in frozen if m.parameter in each.state})


def checked_templates(
    optimizers: Sequence[Optimizer],
    buckets: Sequence[BucketLayout],
    sharding: ShardingSpec,
    earlier: Sequence[Optimizer] = (),
    earlier_templates: Templates = (),
) -> Templates:
    """The templates of all param groups of these optimizers, which go with the plan and with each other.

    Args:
        buckets: all trainable ones, on whose members the param groups are noted.
        earlier: optimizers that the model has already, and `earlier_templates` those of their param groups.

    Raises:
        BadInput: for what does not go together.
    """
    precision, diloco = sharding.precision, sharding.diloco
    _check_several(len(earlier) + len(optimizers), buckets, precision, diloco)
    check_narrow(map(type, optimizers), precision)
    templates = [template for each in optimizers for template in templates_of(each, sharding.axes.device)]
    check_zeros(templates, precision, diloco)
    check_matrices(buckets, [*earlier_templates, *templates], [*earlier, *optimizers])
    if any(template.per_element for template in templates):
        _warn_of_wide_moments(precision)
    return templates


def templates_of(optimizer: Optimizer, device: torch.device) -> Templates:
    """The template of each of its param groups, on the mesh's device."""
    return [OptimizerProbe(optimizer, group, device).template() for group in optimizer.param_groups]


def _warn_of_wide_moments(precision: Precision) -> None:
    """Say where moments take more bytes than the values that a step leaves in them have."""
    moments, master = precision.moments, precision.master
    if isinstance(moments, torch.dtype) and moments.itemsize > master.itemsize and dist.get_rank() == 0:
        wide, own = DTYPE_NAMES[moments], DTYPE_NAMES[master]
        other = ", or 'int8', which is stepped in fp32," if master == torch.bfloat16 else ""
        warn(
            f"precision: moments in {wide} under a master in {own}: a step computes in {own} and rounds moments to it, "
            f"so that they take {moments.itemsize} bytes per element for values of {master.itemsize}. Take moments "
            f"'{own}'{other} or a master in {wide}."
        )


def _check_several(count: int, buckets: Sequence[BucketLayout], precision: Precision, diloco: DiLoCo | None) -> None:
    """Refuse several optimizers where only one can be.

    Raises:
        BadInput: there.
    """
    if count < 2:
        return
    if diloco is not None:
        raise BadInput(
            f"{count} optimizers for one model with diloco: a round counts the steps of one optimizer. Use one "
            "optimizer with several param groups."
        )
    if precision.loss_scaling:
        raise BadInput(
            f"{count} optimizers for one model with fp16: its loss scale follows the steps of one optimizer. Use "
            "precision='bf16', or one optimizer with several param groups."
        )
    if any(tier != "device" for bucket in buckets for tier in (bucket.spec.tiers.grad, bucket.spec.tiers.optim)):
        name = next(b.members[0].name for b in buckets if {b.spec.tiers.grad, b.spec.tiers.optim} != {"device"})
        raise BadInput(
            f"{count} optimizers for one model with gradients or optimizer state away from the device, such as those "
            f"of {name!r}: updates there follow the steps of one optimizer. Leave both on the device (weights may be "
            "elsewhere: tz.Plan.named('zero3').on(weight='cpu')), or use one optimizer with several param groups."
        )
