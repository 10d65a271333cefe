"""Which frozen matrices are kept in 4 bits, and what of that is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.formats.format_names import FrozenFormat
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.plan.box import Box
from terrazzo.engine.plan.layout import PAGE_BYTES
from terrazzo.engine.plan.partition import Member, UnitSpec
from terrazzo.engine.plan.precision import Precision
from terrazzo.errors import BadInput, listed

__all__ = ["check_packed", "cuts_blocks", "packed_members"]


def packed_members(spec: UnitSpec, precision: Precision) -> frozenset[int]:
    """The places of the parameters of a unit that are kept in 4 bits: frozen weights of linear layers inside of it.

    Not those of the root, such as embeddings and the head, of a unit that is a linear layer itself, or what is tied.
    """
    if precision.frozen is None or not spec.name:
        return frozenset()
    return frozenset(member.position for member in spec.members if _is_packed(spec, member))


def _is_packed(spec: UnitSpec, member: Member) -> bool:
    inside = member.name.rpartition(".")[0] != spec.name
    of_numbers = member.parameter.dtype.is_floating_point  # and not codes that the module decodes itself
    return member.is_matrix and inside and of_numbers and not member.trainable and not member.stages


def check_packed(units: Sequence[Unit], precision: Precision, axes: Axes, offload: Offload) -> None:
    """Refuse a precision that keeps frozen matrices in 4 bits where there are none, or where they cannot be kept so.

    Raises:
        BadInput: there.
    """
    form = precision.frozen
    if form is None:
        return
    buckets = [bucket for unit in units for bucket in unit.buckets if bucket.packed is not None]
    if not buckets and not axes.stages:  # whose other ranks may have some
        raise BadInput(
            f"precision: frozen is {form}, and no unit has a frozen weight of a linear layer that could be kept so. "
            "Freeze the model with requires_grad_(False) before adapters are added and before tz.shard, name blocks "
            "as units, or leave frozen out."
        )
    members = [member for bucket in buckets for member in bucket.members]
    _check_cuts(members, form)
    in_files = any(bucket.tiers.weight == "nvme" for bucket in buckets)
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


def cuts_blocks(box: Box, numel: int) -> bool:
    """Whether blocks of `numel` elements that count from where a rank's part of a matrix begins are others than those
    that count from where the whole matrix begins.
    """
    if box.is_all:
        return False
    width = box.shape[-1]
    for each in box.rectangles:
        if each.sizes[-1] == width:  # whole rows
            first, count = each.offsets[0] * width, each.sizes[0] * width
        else:
            first, count = each.offsets[-1], each.sizes[-1]
            if width % numel:
                return True
        if first % numel or count % numel:
            return True
    return False
