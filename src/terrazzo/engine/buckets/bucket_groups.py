"""Which parameters of a unit share a bucket, and the units of a model laid out so, before anything is allocated."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from terrazzo.engine.buckets.bucket_layout import BucketLayout
from terrazzo.engine.buckets.unit_layout import UnitLayout
from terrazzo.engine.partition.packed_members import packed_members
from terrazzo.engine.partition.unit_members import Member, UnitSpec
from terrazzo.engine.plan.kept_weights import Keep
from terrazzo.engine.plan.layout import travels_in_blocks
from terrazzo.engine.plan.precision import Precision
from terrazzo.engine.plan.sharding_spec import ShardingSpec

__all__ = ["laid_out"]


def laid_out(specs: Sequence[UnitSpec], sharding: ShardingSpec, owners: Sequence[int]) -> list[UnitLayout]:
    """The units of a model, laid out.

    Args:
        owners: for each param group the number of its optimizer.
    """
    units, names = [], tuple(spec.name for spec in specs)
    for index, spec in enumerate(specs):
        tiers = sharding.plan.tiers_of(index, len(specs))
        packed = packed_members(spec, sharding.precision)
        groups = _groups(spec.members, owners, packed, sharding.precision)
        buckets = [
            BucketLayout.of(
                group,
                sharding.of(group[0].family),
                keep=Keep.of(is_root=not spec.name, beside_packed=bool(packed)),
                tiers=tiers,
                packed=sharding.precision.frozen if group[0].position in packed else None,
            )
            for group in groups
        ]
        units.append(UnitLayout(names, index, spec.module, buckets, spec.forward_only))
    return units


class _GroupKey(NamedTuple):
    """Properties that parameters must have in common to share a flat space. Buckets come in the order of these keys.

    Attributes:
        is_frozen: whether they are frozen; trainable ones come first.
        family: over which axes their gradients are summed.
        optimizer: number of the optimizer that steps them; -1 for none.
        stored: dtype of parameters that are no floating-point numbers, else empty.
        tied_ranks: ranks along `pp` that have them, where several do.
        is_packed: whether they are kept in 4 bits.
        is_left_out: whether they are sent in a dtype where matrices are sent in blocks.
    """

    is_frozen: bool
    family: str
    optimizer: int
    stored: str
    tied_ranks: tuple[int, ...]
    is_packed: bool
    is_left_out: bool


def _groups(
    members: Sequence[Member], owners: Sequence[int], packed: Container[int], precision: Precision
) -> list[list[Member]]:
    """Groups of members that can share a flat space, in the order of their `_GroupKey`; inside of each the members are
    in the order of their param groups.

    Args:
        packed: the positions of matrices that are kept in 4 bits.
    """
    groups: dict[_GroupKey, list[Member]] = {}
    for member in sorted(members, key=lambda member: member.group if member.trainable else -1):
        dtype = member.parameter.dtype
        stored = "" if dtype.is_floating_point else str(dtype)
        in_blocks = precision.sends_in_blocks(member.trainable)
        key = _GroupKey(
            is_frozen=not member.trainable,
            family=member.family.value,
            optimizer=owners[member.group] if member.trainable and member.group >= 0 else -1,
            stored=stored,
            tied_ranks=member.tied_ranks,
            is_packed=member.position in packed,
            is_left_out=in_blocks and not stored and not travels_in_blocks(member.shape),
        )
        groups.setdefault(key, []).append(member)
    return [groups[key] for key in sorted(groups)]
