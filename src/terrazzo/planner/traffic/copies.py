"""What comes and goes between the device, the host's memory and its disks, for one bucket."""

from __future__ import annotations

from terrazzo.engine.plan.bucket_bytes import weight_bytes
from terrazzo.engine.plan.kept_weights import Keep
from terrazzo.engine.plan.moves import MoveBytes
from terrazzo.planner.layout.buckets import PlannedBucket
from terrazzo.planner.machine.transfers import Link, When
from terrazzo.words import TIERS

__all__ = ["copies"]


def copies(bucket: PlannedBucket, when: When, each_is_reduced: bool) -> list[MoveBytes]:
    """The copies of one rank at one moment of a step.

    Resting weights are fetched before each gather, gradients go to their tier once they are reduced, those of
    earlier micro-batches no further than the host's memory, and an update happens where the optimizer's state lies.

    Args:
        each_is_reduced: whether micro-batches before the last are reduced too. All gradients are then, also those that
            no other rank has, as of experts without copies on other ranks.
    """
    tiers, resting_bytes = bucket.tiers, weight_bytes(bucket, bucket.numel(bucket.weight_axes))
    fetches_again = bucket.keep is not Keep.ALL and bucket.between_axes == bucket.weight_axes
    if when is When.FORWARD or (when is When.BACKWARD and fetches_again):
        return _way(tiers.weight, resting_bytes, "weights to the device", "weights from disk")
    if when is When.BACKWARD or not bucket.trainable:
        return []
    if when is When.UPDATE:
        return _update(bucket)
    if tiers.grad == "device" or (when is When.REDUCE and not each_is_reduced):
        return []
    itemsize = bucket.precision.accumulate.itemsize
    if when is When.REDUCE:
        partial = bucket.numel(bucket.plan.grad.axes) * itemsize
        return [_copy("gradients to the host", partial), _copy("gradients to the device", partial)]
    finished = bucket.numel(bucket.optim_axes) * itemsize
    return _way(tiers.grad, finished, "gradients to the host", "gradients to disk")


def _update(bucket: PlannedBucket) -> list[MoveBytes]:
    precision, tiers, owned, moves = bucket.precision, bucket.tiers, bucket.numel(bucket.optim_axes), list[MoveBytes]()
    grad_bytes = owned * precision.accumulate.itemsize
    if tiers.grad == "nvme":
        moves.append(_copy("gradients from disk", grad_bytes, Link.DISK))
    if tiers.optim == "device" and tiers.grad != "device":
        moves.append(_copy("gradients to the device", grad_bytes))
    if tiers.optim != "device" and tiers.grad == "device":
        moves.append(_copy("gradients to the host", grad_bytes))
    if tiers.optim != "device" and (matrix_bytes := bucket.matrix_wire_bytes):
        moves += [_copy(f"matrices {way} the device", matrix_bytes) for way in ("to", "from")]
    if tiers.optim == "nvme":
        state = owned * precision.exact_master.itemsize + bucket.moments_bytes
        moves += [_copy(f"optimizer state {way} disk", state, Link.DISK) for way in ("from", "to")]
        if bucket.averaged:
            moves.append(_copy("master weights from disk", owned * precision.exact_master.itemsize, Link.DISK))
    if bucket.has_own_master or bucket.weight_axes != bucket.optim_axes:
        moves += _new_weights(bucket)
    return moves


def _new_weights(bucket: PlannedBucket) -> list[MoveBytes]:
    """Copies of updated weights to where they rest; those that rest less split are gathered on the device first."""
    weight, optim, itemsize = bucket.tiers.weight, bucket.tiers.optim, bucket.weight_dtype.itemsize
    moves = list[MoveBytes]()
    gathered = weight != "device" and bucket.weight_axes != bucket.optim_axes
    if optim != "device" and (weight == "device" or gathered):
        moves.append(_copy("updated weights to the device", bucket.numel(bucket.optim_axes) * itemsize))
    count_bytes = bucket.numel(bucket.weight_axes) * itemsize
    resting = _way(weight, count_bytes, "updated weights to the host", "updated weights to disk")
    return moves + [move for move in resting if move.over == Link.DISK or optim == "device" or gathered]


def _way(tier: str, count_bytes: float, beside: str, beyond: str) -> list[MoveBytes]:
    """Copies between the device and a tier: over the link to the host, and over that to its disks."""
    moves = [_copy(beside, count_bytes), _copy(beyond, count_bytes, Link.DISK)]
    return moves[: TIERS.index(tier)]


def _copy(what: str, count_bytes: float, link: Link = Link.PCIE) -> MoveBytes:
    return MoveBytes("copy", what, link, count_bytes)
