"""Bytes of what a bucket has on one rank: states at rest, and what comes and goes in a step. Amounts are here alone.

`BucketSpec` says which states there are and how they are split, `bucket_memory` at which events of a step memory comes
and goes, and `terrazzo.engine.offload.needs` what passes through the host's memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from terrazzo.engine.plan.bucket_spec import BucketSpec
from terrazzo.engine.plan.error_feedback import RESIDUAL_DTYPE
from terrazzo.engine.plan.moves import GradientFate

__all__ = [
    "StateBytes",
    "arriving_bytes",
    "average_at_rest",
    "between_bytes",
    "copied_bytes",
    "finished_bytes",
    "full_bytes",
    "partial_bytes",
    "pending_bytes",
    "resting_bytes",
    "scratch_bytes",
    "states_at_rest",
    "staying_bytes",
    "weight_bytes",
]


# -- at rest -----------------------------------------------------------------------------------------------------------


class StateBytes(NamedTuple):
    """A state at rest on one rank: `weight`, `master`, `grad`, `moments`, `outer`, `residuals` or `average`."""

    state: str
    tier: str
    nbytes: int


def states_at_rest(spec: BucketSpec, moments: Sequence[float] = ()) -> Iterator[StateBytes]:
    """Yield the states of one rank at rest.

    Args:
        moments: bytes of each state that the optimizer keeps for elements of the rank.
    """
    precision, tiers, owned = spec.precision, spec.tiers, spec.numel(spec.optim_axes)
    yield StateBytes("weight", tiers.weight, weight_bytes(spec, spec.numel(spec.weight_axes)))
    if spec.has_own_master:
        yield StateBytes("master", tiers.optim, owned * precision.master.itemsize)
    if spec.has_remainder:
        yield StateBytes("master", tiers.optim, owned * precision.remainder_bytes)
    if spec.trainable:
        yield StateBytes("grad", tiers.grad, owned * precision.accumulate.itemsize)
        yield from (StateBytes("moments", tiers.optim, math.ceil(nbytes)) for nbytes in moments)
        outer = StateBytes("outer", spec.outer_tier, spec.numel(spec.outer_axes) * torch.float32.itemsize)
        yield from [outer] * spec.outer_states
        for residual in spec.gradient_wire.residuals:
            one = StateBytes("residuals", spec.residual_tier, spec.numel(residual.axes) * RESIDUAL_DTYPE.itemsize)
            yield from (one, one)  # as the last step has left it and as the next will: a step may be left out


def average_at_rest(spec: BucketSpec) -> StateBytes:
    """What a `tz.EMA` keeps of trained weights."""
    return StateBytes("average", spec.average_tier, spec.numel(spec.optim_axes) * spec.precision.exact_master.itemsize)


def weight_bytes(spec: BucketSpec, numel: int) -> int:
    """`numel` resting weights, in whole blocks where they are packed."""
    return numel * spec.weight_dtype.itemsize if spec.packed is None else spec.packed.blocks.size_bytes(numel)


def resting_bytes(buckets: Iterable[BucketSpec]) -> Counter[str]:
    """Each state of several buckets that rests on the device; moments left out."""
    total = Counter[str]()
    for state, tier, nbytes in (resting for bucket in buckets for resting in states_at_rest(bucket)):
        total[state] += nbytes * (tier == "device")
    return total


# -- full weights ------------------------------------------------------------------------------------------------------


def full_bytes(spec: BucketSpec) -> int:
    """Full weights beside those at rest."""
    return 0 if spec.resident else spec.full_numel * spec.compute_dtype.itemsize


def between_bytes(spec: BucketSpec) -> int:
    """What is kept from forward to backward in place of full weights, beside the weights at rest.

    Of packed weights these are codes, which lie beside full weights too.
    """
    if not spec.regathered or spec.between_axes == spec.weight_axes:
        return 0
    numel = spec.numel(spec.between_axes)
    return weight_bytes(spec, numel) if spec.weight_wire.codes_stay else numel * spec.compute_dtype.itemsize


def staying_bytes(spec: BucketSpec) -> int:
    """What stays from forward to backward."""
    return between_bytes(spec) if spec.regathered else full_bytes(spec)


def arriving_bytes(spec: BucketSpec, again: bool) -> int:
    """The message that full weights come in, until it is decoded; 0 where they come straight.

    Args:
        again: from what `between` keeps of them; else from where weights rest.
    """
    split = spec.between_axes if again else spec.weight_axes
    return spec.weight_wire.message_bytes(spec.full_numel) if split and not spec.resident else 0


def scratch_bytes(spec: BucketSpec) -> int:
    """Memory to encode or decode what is sent of full weights, or to decode the codes that they rest in."""
    return spec.weight_wire.scratch_bytes(spec.full_numel, spec.device_kind)


# -- gradients ---------------------------------------------------------------------------------------------------------


def pending_bytes(spec: BucketSpec, fate: GradientFate) -> int:
    """An unreduced gradient."""
    return spec.trainable * spec.full_numel * spec.pending_dtype(fate).itemsize


def copied_bytes(spec: BucketSpec, unreduced_bytes: int) -> int:
    """Unreduced gradients of the other stages that have the same parameters, as they come to be added."""
    return unreduced_bytes * max(0, len(spec.tied_ranks) - 1)


def partial_bytes(spec: BucketSpec) -> int:
    """Sums of earlier micro-batches, at the plan's `grad` place, if they stay on the device."""
    return _sum_bytes(spec, spec.plan.grad.axes)


def finished_bytes(spec: BucketSpec) -> int:
    """The finished gradient, if it stays on the device."""
    return _sum_bytes(spec, spec.optim_axes)


def _sum_bytes(spec: BucketSpec, split: tuple[str, ...]) -> int:
    on_device = spec.trainable and spec.tiers.grad == "device"
    return on_device * spec.numel(split) * spec.precision.accumulate.itemsize
