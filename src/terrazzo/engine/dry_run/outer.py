"""A dry run of the outer step of replicas that train by themselves: what `model/outer_step` does, in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.comm.transfer import Transfer
from terrazzo.engine.dry_run.counting import CountingBucket, StepCounts
from terrazzo.engine.instrumentation.tally import Tally

__all__ = ["dry_run_outer_step"]

_ITEMSIZE = torch.float32.itemsize


def dry_run_outer_step(buckets: Sequence[Bucket]) -> Tally:
    """Transient memory and traffic of one outer step on this rank, and of what replicas compare as its round begins.

    Nothing where there is none.

    Args:
        buckets: all of the model; they need not be built.
    """
    tally, trained = Tally(), [bucket.spec for bucket in buckets if bucket.spec.outer_states]
    if not trained:
        return tally
    axes, settings = buckets[0].axes, trained[0].diloco
    assert settings is not None, "an outer step has settings"
    along, traffic, ledger = axes.along(axes.replica_axis[0]), tally.traffic, tally.ledger
    for axis in axes.live(axes.whole_mesh):  # whether the round begins alike
        traffic.record("control", (2 if axis in axes.replica_axis else 1) * torch.int64.itemsize)
    for numel in settings.messages(sum(spec.numel(spec.outer_axes) for spec in trained)):
        with ledger.holding(settings.held_bytes(numel, along.size, axes.device.type)):
            if along.size > 1 and settings.traffic == "int8":
                traffic.record("all_gather", settings.sent_bytes(numel, along.size))
            elif along.size > 1:
                with ledger.holding(along.receive_bytes(settings.message_numel(numel, along.size) * _ITEMSIZE)):
                    traffic.record("all_reduce", settings.sent_bytes(numel, along.size))
    for spec in trained:
        with ledger.holding(spec.outer_gathers_apart * spec.numel(spec.optim_axes) * _ITEMSIZE):
            for move in spec.outer_gathers:
                traffic.record(move.kind, int(move.sent_bytes))
        Transfer(CountingBucket(spec, StepCounts(traffic, ledger, None)).publish()).finish()
    return tally
