"""Checks of precision and offload: what the device cannot do, and what does not go together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist

from terrazzo.engine.buckets.bucket_layout import BucketLayout
from terrazzo.engine.buckets.parameters.gradient_hooks import ACCUMULATED_HAS_SCALE, has_accumulate_hooks
from terrazzo.engine.buckets.unit_layout import UnitLayout
from terrazzo.engine.comm.backends import backend_of
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.mesh.family import seeing_other_data
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.plan.layout import PAGE_BYTES
from terrazzo.engine.plan.place import Plan
from terrazzo.engine.plan.precision import Precision
from terrazzo.engine.plan.sharding_spec import ShardingSpec
from terrazzo.engine.runtime import device as devices
from terrazzo.errors import BadInput
from terrazzo.messages import warn

__all__ = [
    "check_graphs",
    "check_hooks",
    "check_offload",
    "check_precision",
    "formats_without_messages",
    "warn_of_unused",
    "warn_of_unused_formats",
]


def check_precision(precision: Precision, axes: Axes) -> None:
    """Refuse a dtype in which the device cannot compute, or with which NCCL would lose gradients.

    Raises:
        BadInput: there.
    """
    device = axes.device
    groups = [axes.along(axis).group for axis in axes.live(axes.within_stage)]
    if precision.reduce == torch.float16 and any(backend_of(group, device) == "nccl" for group in groups):
        raise BadInput(
            "precision: reduce='fp16' with NCCL, which sums in the dtype that is sent: a sum over ranks overflows "
            "where none of its terms does. Use reduce='fp32', or 'bf16', which costs the same bytes."
        )
    try:
        probe = torch.ones((2, 2), dtype=precision.compute, device=device)
        torch.nn.functional.linear(probe, probe)
    except RuntimeError as error:
        raise BadInput(
            f"precision: {device} cannot multiply matrices in {precision.compute} ({error}). Choose "
            "precision='bf16' or 'fp32'."
        ) from None


def check_graphs(units: Iterable[UnitLayout], device: torch.device) -> None:
    """Refuse units captured in CUDA graphs whose weights come and go: a graph reads fixed addresses.

    Raises:
        BadInput: there.
    """
    for unit in units:
        if devices.is_cuda(device) and unit.captured and not all(spec.resident for spec in unit.specs):
            raise BadInput(
                f"{unit.title}: compiled into CUDA graphs (mode 'reduce-overhead' or 'max-autotune'), which read "
                "weights at fixed addresses, and this plan frees them between uses. "
                "Compile with mode=None or 'max-autotune-no-cudagraphs', or a plan that keeps weights whole: zero0, "
                "zero1 or zero2 in fp32."
            )


def check_hooks(members: Iterable[Member], precision: Precision) -> None:
    """Refuse hooks that would find gradients multiplied by the loss scale.

    Raises:
        BadInput: there.
    """
    for member in members if precision.loss_scaling else ():
        if has_accumulate_hooks(member.parameter):
            raise BadInput(f"{member.name!r} has been given a hook by {ACCUMULATED_HAS_SCALE}")


def check_offload(tiers: Collection[str], precision: Precision, offload: Offload) -> None:
    """Refuse settings of offload that cannot work with the tiers in use.

    Raises:
        BadInput: there.
    """
    if "nvme" in tiers and not offload.folders:
        raise BadInput(
            "The plan places states on nvme, but no folder is given for them: pass offload=tz.Offload(path=...), or "
            "offload.path in a configuration."
        )
    narrow = precision.narrow if "nvme" in tiers else None
    if narrow is not None and narrow.blocks.size_bytes(offload.cell_numel) % PAGE_BYTES:
        raise BadInput(
            f"offload: block_mib is {offload.block_mib:g} and moments are in {narrow}, whose pieces in files "
            "are whole pages in multiples of 1 MiB alone: set block_mib to 1, 2 or 4, say."
        )
    if offload.step == "backward" and precision.loss_scaling:
        raise BadInput(
            "offload: step 'backward' updates units before the gradients of all are known, but fp16 loss scaling "
            "must see them all. Use step='overlapped', or precision='bf16'."
        )


def warn_of_unused(plan: Plan, offload: Offload, activations: bool) -> None:
    """Warn of settings of offload that have been given and change nothing; arguments as of `Offload.unused_under`."""
    for (why, tier), names in Offload.unused_under(plan, activations).items():
        _warn_of(offload, names, plan, why, f", or place states there, as plan 'zero3@{tier}' does")


def formats_without_messages(plan: Plan, data: Sequence[str]) -> dict[str, Sequence[str]]:
    """Names of settings of a `Precision` for messages that no rank sends, by the reason why.

    Args:
        plan: in axes with more than one rank.
        data: those of them along which ranks see different data.
    """
    unused: dict[str, Sequence[str]] = {}
    if not plan.weight.axes and not plan.optim.axes:
        unused["every rank has all weights and updates all, so that none are gathered"] = ("gather",)
    if not data:
        why = "no two ranks see different data, so that no gradients are summed over ranks"
        unused[why] = ("quantized_reduce", "error_feedback")
    return unused


def warn_of_unused_formats(sharding: ShardingSpec, buckets: Iterable[BucketLayout]) -> None:
    """Warn of what a precision says of messages where none of `buckets` has any."""
    of_buckets = [
        formats_without_messages(bucket.spec.plan, seeing_other_data(bucket.spec.ranks)) for bucket in buckets
    ]
    for why, names in of_buckets[0].items():
        if all(why in unused for unused in of_buckets):
            _warn_of(sharding.precision, names, sharding.mesh_plan, why)


def _warn_of(settings: Offload | Precision, names: Iterable[str], plan: Plan, why: str, instead: str = "") -> None:
    kind = type(settings)
    changed = [name for name in names if getattr(settings, name) != getattr(kind(), name)]
    if changed and dist.get_rank() == 0:
        change, them = ("changes", "it") if len(changed) == 1 else ("change", "them")
        warn(
            f"tz.{kind.__name__}: {', '.join(changed)} {change} nothing under plan {plan.name}: {why}. Leave {them} "
            f"out{instead}."
        )
