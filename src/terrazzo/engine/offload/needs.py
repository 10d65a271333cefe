"""What a model takes beside the device, from shapes, places and dtypes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from terrazzo.engine.bucket import Bucket
from terrazzo.engine.offload.drive import padded_bytes
from terrazzo.engine.offload.store import Need
from terrazzo.engine.optim.stock import StateSpec

__all__ = ["Templates", "further_moment_bytes", "moment_names", "need_of"]

Templates = Sequence[Mapping[str, StateSpec]]
"""What the optimizer keeps for a parameter of each param group."""


def moment_names(bucket: Bucket, templates: Templates) -> list[str]:
    """What the optimizer keeps for each element of a bucket."""
    groups = dict.fromkeys(member.group for member in bucket.members if member.group >= 0)
    names = [name for group in groups for name, spec in templates[group].items() if spec.per_element]
    return list(dict.fromkeys(names))


def further_moment_bytes(buckets: Sequence[Bucket], templates: Templates) -> list[int]:
    """What the optimizer keeps for each element away from the device, beyond what earlier ones have left room for.

    One entry for each state of a bucket.
    """
    return [
        _numel(bucket, bucket.optim_axes) * bucket.recipe.precision.moments.itemsize
        for bucket in buckets
        for _ in (moment_names(bucket, templates)[bucket.moments_room :] if bucket.updated_apart else ())
    ]


def need_of(buckets: Sequence[Bucket], templates: Templates, cell: int) -> Need:
    """What these buckets take, whether or not they have been built.

    Args:
        templates: none without an optimizer.
        cell: elements of states on drives that are handled at once.
    """
    sizes = [(tier, size) for bucket in buckets for tier, size in _states(bucket, templates)]
    return Need(
        cpu=tuple(size for tier, size in sizes if tier == "cpu"),
        nvme=tuple(size for tier, size in sizes if tier == "nvme"),
        load=max((_load_bytes(bucket, cell) for bucket in buckets), default=0),
        tray=max((_tray_bytes(bucket, templates, cell) for bucket in buckets), default=0),
    )


def _states(bucket: Bucket, templates: Templates) -> Iterator[tuple[str, int]]:
    """Tier and bytes of each state that a bucket keeps at rest."""
    precision, tiers, owned = bucket.recipe.precision, bucket.tiers, _numel(bucket, bucket.optim_axes)
    yield tiers.weight, _numel(bucket, bucket.weight_axes) * bucket.weight_dtype.itemsize
    if bucket.has_own_master:
        yield tiers.optim, owned * precision.master.itemsize
    if bucket.trainable:
        yield tiers.grad, owned * precision.accumulate.itemsize
    for _ in moment_names(bucket, templates) if bucket.updated_apart else ():
        yield tiers.optim, owned * precision.moments.itemsize


def _load_bytes(bucket: Bucket, cell: int) -> int:
    """One cell of weights that are gathered from drives, to compute with them or to make new ones of master weights."""
    if bucket.tiers.weight != "nvme":
        return 0
    weight_bytes = min(cell, _numel(bucket, bucket.weight_axes)) * bucket.weight_dtype.itemsize
    if not (bucket.has_own_master and bucket.tiers.optim == "nvme" and bucket.gathers_apart):
        return weight_bytes
    return max(weight_bytes, min(cell, _numel(bucket, bucket.optim_axes)) * bucket.recipe.precision.master.itemsize)


def _tray_bytes(bucket: Bucket, templates: Templates, cell: int) -> int:
    """One cell of everything that an update brings from drives and back."""
    if not (templates and bucket.trainable and bucket.tiers.optim == "nvme"):
        return 0
    precision, numel = bucket.recipe.precision, min(cell, _numel(bucket, bucket.optim_axes))
    dtypes = [precision.master, *(precision.moments for _ in moment_names(bucket, templates))]
    if bucket.has_own_master and bucket.tiers.weight == "nvme":
        dtypes.append(bucket.weight_dtype)
    if bucket.tiers.grad == "nvme":
        dtypes.append(precision.accumulate)
    return sum(padded_bytes(numel * dtype.itemsize) for dtype in dtypes)


def _numel(bucket: Bucket, axes: tuple[str, ...]) -> int:
    return bucket.space.range(axes).numel
