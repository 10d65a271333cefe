"""Memory that a bucket allocates and frees on the device at each event of a step. When that is, is said here alone.

Events have no order of their own: the dry run counts in the order of the engine's schedule (`CountingBucket`), the
planner's search in that of its walk (`terrazzo.planner.memory.unit_events`). The engine does with tensors what is
listed here; tests compare the peaks.

    gather          weights are asked for, and none are here; `again`: what `between` keeps of them is here
    decode          what was sent in blocks of 8 bits, or as codes, has come
    arrive          full weights can be read in place of what `between` kept
    rest_between    forward has ended
    release         full weights go
    drop_between    what `between` kept goes
    publish         new weights are brought from where they were stepped to where they rest
    reduction       gradients are summed over ranks, one collective after the other

How much, `bucket_bytes` says: with a bucket's first gradient `pending_bytes` come, and `resting_bytes` stay throughout.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from terrazzo.engine.plan.bucket_bytes import (
    arriving_bytes,
    between_bytes,
    finished_bytes,
    full_bytes,
    partial_bytes,
    scratch_bytes,
)
from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.moves import GradientFate, MoveBytes

__all__ = [
    "Allocation",
    "GivenBack",
    "InFlight",
    "StepMemory",
    "arrive",
    "decode",
    "drop_between",
    "gather",
    "publish",
    "publishes_late",
    "reduction",
    "release",
    "rest_between",
]


class StepMemory(enum.IntEnum):
    """Purpose of memory. The first three together are transient memory; sums are counted beside it."""

    GATHERED = 0
    """Full weights, and what is kept of them between forward and backward."""
    UNREDUCED = 1
    """Gradients that no collective has taken yet, and sums of earlier micro-batches."""
    RECEIVE = 2
    """Gradients under way, and what arrives to be summed."""
    GRADIENTS = 3
    """Finished gradients."""
    SUMS = 4
    """What the reduce-scatters of a reduction have made so far. Estimates from shapes alone leave it out."""


_GATHERED, _UNREDUCED, _RECEIVE, _GRADIENTS, _SUMS = StepMemory


class Allocation(NamedTuple):
    """Bytes that are allocated, or freed where they are negative."""

    kind: StepMemory
    nbytes: int


class GivenBack(NamedTuple):
    """Bytes that a reduction has no use for any more. If it runs beside the computation, they stay until it has waited.

    Attributes:
        lent: the next reduction may have them before that: see `terrazzo.engine.comm.transfer.Released`.
    """

    kind: StepMemory
    nbytes: int
    lent: bool


class InFlight(NamedTuple):
    """One of the steps of a collective: for as long as it is in flight, what arrives has memory.

    Attributes:
        move: None of what is read from files, for which the host waits.
    """

    move: MoveBytes | None
    received_bytes: int = 0
    is_first: bool = True


# -- weights -------------------------------------------------------------------------------------------------------


def gather(spec: BucketSpec, again: bool) -> Iterator[Allocation]:
    """Full weights are gathered.

    Args:
        again: from what `between` keeps of them; else from where weights rest.
    """
    if spec.resident:
        return
    message_bytes = arriving_bytes(spec, again)
    yield Allocation(_GATHERED, message_bytes)
    if spec.gathers_into_place or not message_bytes:
        yield Allocation(_GATHERED, full_bytes(spec))
    if message_bytes:
        yield from _scratch(spec)


def decode(spec: BucketSpec, again: bool) -> Iterator[Allocation]:
    """Codes that `gather` has sent become full weights; of packed weights a part of the codes stays.

    Nothing happens where weights are sent in a dtype. Argument as of `gather`.
    """
    if spec.weight_wire.codes_stay:
        if not again:
            yield Allocation(_GATHERED, between_bytes(spec))
        yield from _scratch(spec)
    if message_bytes := arriving_bytes(spec, again):
        if not spec.gathers_into_place:
            yield Allocation(_GATHERED, full_bytes(spec))
        yield from _scratch(spec)
        yield Allocation(_GATHERED, -message_bytes)


def _scratch(spec: BucketSpec) -> Iterator[Allocation]:
    yield Allocation(_GATHERED, scratch_bytes(spec))
    yield Allocation(_GATHERED, -scratch_bytes(spec))


def arrive(spec: BucketSpec) -> Iterator[Allocation]:
    """Full weights can be read: what `between` kept in their place goes, but codes stay beside them."""
    if not spec.weight_wire.codes_stay:
        yield from drop_between(spec)


def drop_between(spec: BucketSpec) -> Iterator[Allocation]:
    """A step is over: what `between` kept goes."""
    yield Allocation(_GATHERED, -between_bytes(spec))


def rest_between(spec: BucketSpec, is_kept: bool) -> Iterator[Allocation]:
    """Full weights go, if backward gathers them again.

    Args:
        is_kept: what `between` keeps is here, as of codes since they were gathered.
    """
    if spec.regathered:
        if not is_kept:
            yield Allocation(_GATHERED, between_bytes(spec))
        yield Allocation(_GATHERED, -full_bytes(spec))


def release(spec: BucketSpec) -> Iterator[Allocation]:
    """Full weights go, and codes that are kept beside them."""
    if spec.weight_wire.codes_stay:
        yield from drop_between(spec)
    yield Allocation(_GATHERED, -full_bytes(spec))


def publish(spec: BucketSpec) -> Iterator[Allocation | InFlight]:
    """New weights are brought from their masters to where weights rest.

    That is at a step's end; where updates away from the device run on into the next forward, before it gathers them.
    """
    own = spec.numel(spec.weight_axes)
    apart_bytes = spec.gathers_apart * own * spec.weight_dtype.itemsize
    message_bytes = spec.update_wire.message_bytes(own)
    encoding_bytes = scratch_bytes(spec) if message_bytes else 0
    yield Allocation(_GATHERED, apart_bytes)
    if spec.gathers_apart and spec.tiers.optim == "nvme":
        yield InFlight(None)
    yield from (Allocation(_GATHERED, nbytes) for nbytes in (message_bytes, encoding_bytes, -encoding_bytes))
    yield from (InFlight(move) for move in spec.update_gathers)
    yield from (Allocation(_GATHERED, nbytes) for nbytes in (encoding_bytes, -encoding_bytes, -message_bytes))
    yield Allocation(_GATHERED, -apart_bytes)


def publishes_late(spec: BucketSpec) -> bool:
    """Whether `publish` takes memory, and may come in the next forward."""
    events = publish(spec) if spec.updated_off_device else ()
    return any(isinstance(event, Allocation) and event.nbytes for event in events)


# -- gradients -----------------------------------------------------------------------------------------------------


def reduction(
    spec: BucketSpec, fate: GradientFate, pending_bytes: int, earlier_bytes: int
) -> Iterator[Allocation | GivenBack | InFlight]:
    """A micro-batch's gradient is summed over ranks. Its memory is counted as under way by now.

    Args:
        fate: `REDUCED` or `FINISHED`.
        pending_bytes: of the unreduced gradient.
        earlier_bytes: sums of earlier micro-batches that are here.
    """
    partial, _, finish, _, finishing_bytes = spec.sums.of(fate)
    last, sum_bytes = fate is GradientFate.FINISHED, 0
    for move in partial:
        yield Allocation(_SUMS, move.sum_bytes)
        yield from _in_flight(move)
        yield Allocation(_SUMS, -sum_bytes)
        sum_bytes = move.sum_bytes
    if finish or not last:  # from here on it counts as what it is added to, or summed further as
        yield Allocation(_SUMS, -sum_bytes)
        sum_bytes = 0
    if partial:
        yield GivenBack(_RECEIVE, pending_bytes, lent=True)
    if last:
        yield GivenBack(_UNREDUCED, earlier_bytes, lent=True)
    else:
        yield Allocation(_UNREDUCED, partial_bytes(spec) - earlier_bytes)
    yield Allocation(_RECEIVE, finishing_bytes)
    for move in finish:
        yield from _in_flight(move)
    yield GivenBack(_RECEIVE, finishing_bytes, lent=False)
    if not partial:
        yield GivenBack(_RECEIVE, pending_bytes, lent=True)
    if last:
        yield Allocation(_SUMS, -sum_bytes)
        yield Allocation(_GRADIENTS, finished_bytes(spec))


def _in_flight(move: MoveBytes) -> Sequence[InFlight]:
    return [InFlight(move, move.received_bytes * (step == 0), step == 0) for step in range(move.steps)]
