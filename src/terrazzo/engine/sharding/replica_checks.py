"""Checks before a model is sharded whose replicas train by themselves."""

from __future__ import annotations

import torch

from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.mesh.family import REPLICA_AXIS
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.plan.diloco import DiLoCo
from terrazzo.engine.plan.place import Plan
from terrazzo.engine.plan.precision import DTYPE_NAMES, Precision
from terrazzo.errors import BadInput

__all__ = ["check_diloco", "check_fragments"]


def check_diloco(diloco: object, plan: Plan, precision: Precision, axes: Axes, offload: Offload) -> None:
    """Refuse replicas that train by themselves where there are none, or where their weights have no common place.

    Args:
        axes: all of the mesh.

    Raises:
        BadInput: there.
    """
    if not isinstance(diloco, DiLoCo):
        raise BadInput(f"diloco is {diloco!r}; pass a tz.DiLoCo, such as tz.DiLoCo(sync_every=10).")
    if REPLICA_AXIS not in axes.data or len(axes.data) < 2:
        raise BadInput(
            "diloco needs a mesh with the axes dp_replicate, whose groups train by themselves, and dp_shard, the ranks "
            f"of one group; this mesh has {', '.join(axes.within_stage)}. Pass mesh=tz.mesh(dp_replicate=2), which has "
            "both."
        )
    if plan.groups:
        raise BadInput(
            f"diloco with plan {plan.name}, which tells the ranks of a group from its copies in other groups "
            "(dp_replicate): these train by themselves. Take zero3, which splits over the ranks of one group."
        )
    if precision.exact_master != torch.float32:
        raise BadInput(
            f"diloco with master weights in {DTYPE_NAMES[precision.exact_master]}: outer steps are in fp32. Shard the "
            "model with precision='bf16', which has fp32 masters."
        )
    if precision.error_feedback:
        raise BadInput(
            "diloco with error_feedback, where each replica would have residuals of its own, and outer steps mix their "
            "weights. Leave error_feedback out: int8 needs none, and traffic='int8' is of outer steps."
        )
    if offload.step == "backward" and plan.optim.offloaded:
        raise BadInput(
            "diloco with offload step='backward', which updates weights before optimizer.step() notes those that a "
            "round begins with. Use step='overlapped', the default."
        )


def check_fragments(diloco: DiLoCo | None, trained_units: int) -> None:
    """Refuse more fragments than there are units that are trained.

    Raises:
        BadInput: there.
    """
    if diloco is not None and diloco.fragments > (most := max(1, trained_units)):
        raise BadInput(
            f"diloco: fragments is {diloco.fragments}; they are sets of units, and {trained_units} units of this model "
            f"are trained here: give an int from 1 to {most}, or name smaller units."
        )
