"""Choice of the frozen matrices that are kept in 4 bits, and whether ranks that share one cut its blocks."""

from __future__ import annotations

from terrazzo.engine.partition.box import Box
from terrazzo.engine.partition.unit_members import Member, UnitSpec
from terrazzo.engine.plan.precision import Precision

__all__ = ["cuts_blocks", "packed_members"]


def packed_members(spec: UnitSpec, precision: Precision) -> frozenset[int]:
    """Positions of the parameters of a unit that are kept in 4 bits: frozen weights of linear layers inside of it.

    Not those of the root, such as embeddings and the head, of a unit that is a linear layer itself, or what is tied.
    """
    if precision.frozen is None or not spec.name:
        return frozenset()
    return frozenset(member.position for member in spec.members if _is_packed(spec, member))


def _is_packed(spec: UnitSpec, member: Member) -> bool:
    inside = member.name.rpartition(".")[0] != spec.name
    of_numbers = member.parameter.dtype.is_floating_point  # and not codes that the module decodes itself
    return member.is_matrix and inside and of_numbers and not member.trainable and not member.tied_ranks


def cuts_blocks(box: Box, numel: int) -> bool:
    """Whether blocks of `numel` elements that count from where a rank's part of a matrix begins are not those
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
