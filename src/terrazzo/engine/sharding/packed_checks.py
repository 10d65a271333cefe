"""Checks that frozen matrices can be kept in 4 bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from terrazzo.engine.buckets.unit_layout import UnitLayout
from terrazzo.engine.formats.format_names import FrozenFormat
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.partition.packed_members import cuts_blocks
from terrazzo.engine.partition.unit_members import Member
from terrazzo.engine.plan.layout import PAGE_BYTES
from terrazzo.engine.plan.precision import Precision
from terrazzo.errors import BadInput
from terrazzo.messages import listed

__all__ = ["check_packed"]


def check_packed(units: Sequence[UnitLayout], precision: Precision, axes: Axes, offload: Offload) -> None:
    """Refuse a precision that keeps frozen matrices in 4 bits where there are none, or where they cannot be kept so.

    Raises:
        BadInput: there.
    """
    form = precision.frozen
    if form is None:
        return
    buckets = [bucket for unit in units for bucket in unit.buckets if bucket.spec.packed is not None]
    if not buckets and not axes.stage_axis:  # whose other ranks may have some
        raise BadInput(
            f"precision: frozen is {form}, and no unit has a frozen weight of a linear layer that could be kept so. "
            "Freeze the model with requires_grad_(False) before adapters are added and before tz.shard, name blocks "
            "as units, or leave frozen out."
        )
    members = [member for bucket in buckets for member in bucket.members]
    _check_cuts(members, form)
    in_files = any(bucket.spec.tiers.weight == "nvme" for bucket in buckets)
    if in_files and form.blocks.size_bytes(offload.cell_numel) % PAGE_BYTES:
        raise BadInput(
            f"precision: frozen is {form} under a plan that keeps weights in files, whose pieces are whole pages, and "
            f"with block_mib {offload.block_mib:g} those of {form} are not. Use frozen 'nf4' with a block_mib of 1, 2 "
            "or 4, or a plan that keeps weights in host memory, such as zero3@cpu-all."
        )


def _check_cuts(members: Iterable[Member], form: FrozenFormat) -> None:
    if broken := [member.name for member in members if cuts_blocks(member.box, form.blocks.numel)]:
        finest = min(FrozenFormat, key=lambda each: each.blocks.numel)
        is_finer, numel = finest.blocks.numel < form.blocks.numel, finest.blocks.numel
        other = f"Use frozen '{finest}', whose blocks are of {numel}, or f" if is_finer else "F"
        raise BadInput(
            f"precision: frozen is {form}, whose blocks of {form.blocks.numel:,} elements would be cut where ranks "
            f"along tp share {listed([*map(repr, broken)], 3)}: their values would depend on the number of ranks. "
            f"{other}ewer ranks along tp, or leave frozen out."
        )
