"""What users have written into the weights of buckets, or given them as `data`: taken over, or refused.

`parameters.edits` says what was written; here weights at rest and master weights follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from terrazzo.engine.buckets.bucket import Bucket
from terrazzo.engine.buckets.parameters.edits import copy_into_places
from terrazzo.engine.buckets.resting.buffer import AsSeen, Buffer, copy_changed, differ
from terrazzo.engine.buckets.resting.with_remainder import WithRemainder
from terrazzo.engine.plan.layout import Slot
from terrazzo.engine.runtime.private_torch import plainly
from terrazzo.errors import Misuse
from terrazzo.messages import listed

__all__ = ["refuse_packed_edits", "take_over_data", "take_over_edits", "take_over_gathered"]


def take_over_edits(buckets: Iterable[Bucket]) -> None:
    """Take over what has been written into the whole weights of all buckets of a model, or refuse it.

    Raises:
        Misuse: as `take_over_data`.
    """
    with plainly():  # parameters at rest would answer each question in Python
        known = list(buckets)
        take_over_data(known)
        for bucket in known:
            _take_over_resident(bucket)


def take_over_data(buckets: Iterable[Bucket]) -> None:
    """Copy new `data` that parameters of all buckets of a model have been given to where weights are.

    Raises:
        Misuse: for parameters that have been frozen, unfrozen or replaced, and for `data` that cannot be taken over.
    """
    known = list(buckets)
    if displaced := [each for bucket in known for each in bucket.full.edits.displaced(bucket.full.present)]:
        own = [state.data for b in known for state in (b.weight, b.master) if isinstance(state, Buffer)]
        full = [bucket.full.data for bucket in known]
        copy_into_places(displaced, [bucket.full.edits for bucket in known], [*own, *full])


def take_over_gathered(bucket: Bucket) -> None:
    """Take over what was written in place into gathered weights, after `take_over_data`.

    A master weight is replaced only where the value it rounds to was changed, so that reading and writing back in a
    lower precision loses nothing.
    """
    if bucket.spec.packed is not None:
        return  # `refuse_packed_edits` has seen to it that nothing was
    bucket.note_change()
    written = bucket.full.edits.take_written()
    if not bucket.spec.resident:
        sent, exact = bool(bucket.spec.weight_axes), bucket.exact
        as_seen: AsSeen = bucket.as_seen if sent else lambda values: values
        if isinstance(exact, WithRemainder) and not bucket.spec.has_own_master:
            exact.forget_changed(bucket.full.buffer, as_seen)
        copy_changed(bucket.weight, bucket.full.buffer, as_seen)
    _update_masters(bucket, written)


def _take_over_resident(bucket: Bucket) -> None:
    """Take over what was written in place into whole weights, after `take_over_data`."""
    if not (bucket.spec.resident and bucket.full.present):
        return
    has_master, edits = bucket.spec.has_own_master, bucket.full.edits
    if (written := edits.take_written()) or (
        has_master and edits.data_taken and differ(bucket.master, bucket.weight, bucket.update_as_seen)
    ):
        bucket.note_change()
        edits.taken_over.update(written or edits.data_taken)
        _update_masters(bucket, written)
        if has_master:
            bucket.round_written()


def _update_masters(bucket: Bucket, written: Sequence[str]) -> None:
    """Have master weights be what has been written into weights at rest.

    Args:
        written: names of the parameters that have been. Where whole bf16 weights are the upper half of the master
            weights, nothing tells which elements have changed, and the lower half of all of theirs is set to zero.
    """
    exact = bucket.exact
    if bucket.spec.has_own_master:
        if isinstance(exact, WithRemainder):
            exact.forget_changed(bucket.weight, bucket.update_as_seen)
        copy_changed(bucket.master, bucket.weight, bucket.update_as_seen)
    elif isinstance(exact, WithRemainder) and bucket.spec.resident:
        for slot in bucket.slots:
            if slot.name in written:
                exact.forget(slot.range)


def refuse_packed_edits(bucket: Bucket) -> None:
    """Refuse what was written into gathered weights that are kept in 4 bits, which would round it.

    Raises:
        Misuse: there.
    """
    if bucket.spec.packed is None:
        return
    noticed = bucket.full.edits.take_written()
    if written := noticed or [slot.name for slot in bucket.slots if _is_written(bucket, slot)]:
        raise Misuse(
            f"{listed([*map(repr, written)])} written to, and precision.frozen keeps it in {bucket.spec.packed}, "
            "which would round every element of its blocks again. Write before tz.shard, give new values to "
            "model.load_state_dict, which packs them anew, or leave precision.frozen out."
        )


def _is_written(bucket: Bucket, slot: Slot) -> bool:
    """Whether the full weights differ from this rank's part of a parameter: numpy leaves no trace."""
    for part in bucket.weight.cuts(slot.range.intersect(bucket.weight.range)):
        with bucket.weight.opened(part) as weight, bucket.full.buffer.opened(part) as seen:
            value = weight.to(device=seen.device, dtype=seen.dtype)
            if not torch.allclose(value, seen, rtol=0, atol=0, equal_nan=True):
                return True
    return False
