"""The weights of an outer step, on their way to where the optimizer's are; what that holds and sends."""

from __future__ import annotations

import torch

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.resting.buffer import Buffer
from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.formats.block_format import tile_numel
from terrazzo.engine.instrumentation.tally import Tally
from terrazzo.engine.labels.label import Label
from terrazzo.engine.plan.bucket_spec import BucketSpec

__all__ = ["dry_run_set_master", "set_master"]


def set_master(bucket: Bucket, kept: float, label: Label) -> None:
    """Bring the new weights to where the optimizer's are; ranks that have more of these get the others' parts.

    Args:
        kept: share of what these were that stays.
    """
    first, master = bucket.outer[0], bucket.exact
    for cut in master.cuts(first.range):
        for tile in cut.pieces(tile_numel(bucket.axes.device.type)) if kept else [cut]:
            with master.opened(tile, "change" if kept else "replace") as weights, first.opened(tile) as new:
                if kept:  # each product is rounded by itself, as in a step
                    weights.mul_(kept).add_(new.mul(1 - kept))
                else:
                    weights.copy_(new)
    if bucket.spec.outer_axes == bucket.spec.optim_axes:
        return
    if not bucket.spec.outer_gathers_apart:
        assert isinstance(master, Buffer), "collectives write to it"
        Transfer(master.complete(bucket.spec.outer_axes), label).finish()
        return
    with bucket.ledger.holding(master.nbytes):
        whole = bucket.space.empty(bucket.spec.optim_axes, master.dtype)
        for cut in master.cuts(first.range):
            with master.opened(cut) as own:
                whole.part(cut).copy_(own)
        Transfer(whole.complete(bucket.spec.outer_axes), label).finish()
        master.save(whole)


def dry_run_set_master(spec: BucketSpec, tally: Tally) -> None:
    """Count in `tally` what `set_master` holds and sends."""
    with tally.ledger.holding(spec.outer_gathers_apart * spec.numel(spec.optim_axes) * torch.float32.itemsize):
        for move in spec.outer_gathers:
            tally.traffic.record(move.kind, int(move.sent_bytes))
