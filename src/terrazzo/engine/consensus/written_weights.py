"""Weights that users write while they are gathered, of which each rank keeps its part: compared, or taken from one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.resting.buffer import view
from terrazzo.engine.comm.collectives import MessageRoute
from terrazzo.engine.comm.tags import WRITTEN_WEIGHTS
from terrazzo.engine.consensus.digest import digest
from terrazzo.engine.mesh.axes import Axes
from terrazzo.engine.plan.layout import Slot
from terrazzo.errors import RanksApart
from terrazzo.messages import listed

__all__ = ["broadcast_first", "compare_written"]


def compare_written(axes: Axes, buckets: Sequence[Bucket], replica_axis: Sequence[str]) -> None:
    """Compare what has been written into gathered weights. Collective.

    Args:
        replica_axis: along which replicas that train by themselves have the same weights now; none within a round.

    Raises:
        RanksApart: on every rank, where it differs between ranks that hold the same parameters.
    """
    everyone = (*replica_axis, *axes.within_replica)
    if not axes.live(everyone):
        return
    differing = []
    for along in dict.fromkeys(tuple(bucket.spec.ranks) for bucket in buckets):
        own = [bucket for bucket in buckets if tuple(bucket.spec.ranks) == along]
        # of copies: memory that numpy has seen once cannot be given back
        hashes = {slot.name: digest(view(bucket.full.data, slot).clone()) for bucket in own for slot in bucket.slots}
        differing += axes.differing(hashes, (*along, *replica_axis))
    for bucket in buckets:
        first = _of_first_tied(axes, bucket)
        slots = [] if first is None else [slot for slot in bucket.slots if _differ(bucket, slot, first)]
        differing += [slot.name for slot in slots]
    if axes.anywhere(bool(differing), everyone):
        raise RanksApart(
            "The ranks have not written the same inside 'with tz.gathered(model, write=True)': they differ in "
            f"{listed([*map(repr, differing)]) or 'what other ranks hold'}. Each rank keeps its own part of what it "
            "has. Write the same values on every rank, or on the first alone with "
            "'tz.gathered(model, write=\"first rank\")'."
        )


def broadcast_first(buckets: Iterable[Bucket]) -> None:
    """Take the gathered weights of the first rank, of those that hold the same parameters, on all. Collective."""
    for bucket in buckets:
        axes = bucket.axes
        axes.broadcast(bucket.full.data, (*bucket.spec.ranks, *axes.replica_axis))
        if (first := _of_first_tied(axes, bucket)) is not None:
            bucket.full.data.copy_(first)


def _of_first_tied(axes: Axes, bucket: Bucket) -> Tensor | None:
    """The gathered weights of the first of the ranks along `pp` that share them; None on it. Collective."""
    if not bucket.spec.tied_ranks:
        return None
    links = axes.along(axes.stage_axis[0])
    if bucket.counted.here:
        for handle in [
            links.send(bucket.full.data, MessageRoute("tied", links.rank, rank), WRITTEN_WEIGHTS)
            for rank in bucket.spec.tied_ranks[1:]
        ]:
            handle.wait()
        return None
    received = torch.empty_like(bucket.full.data)
    links.receive(received, MessageRoute("tied", bucket.spec.tied_ranks[0], links.rank), WRITTEN_WEIGHTS).wait()
    return received


def _differ(bucket: Bucket, slot: Slot, other: Tensor) -> bool:
    """Whether a parameter's bits are others in `other`."""
    own, received = (view(data, slot).clone() for data in (bucket.full.data, other))
    return bool((digest(own) != digest(received)).any())
