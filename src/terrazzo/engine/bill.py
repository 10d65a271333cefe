"""What a plan costs in memory, computed before anything is allocated.

States follow from shapes, places and dtypes, the transient peak from a step rehearsed on paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terrazzo.engine.bucket import Bucket
from terrazzo.engine.optimizer import StateSpec
from terrazzo.engine.rehearsal import rehearse
from terrazzo.engine.segment import held_range, runs
from terrazzo.engine.unit import Unit

__all__ = ["MemoryBill", "memory_bill"]


@dataclass(frozen=True)
class MemoryBill:
    """Bytes that the engine holds on this rank. Activations and the framework's own memory come on top.

    Attributes:
        weight_bytes: weights at rest; they include the master weights wherever both are one memory.
        master_bytes: master weights in memory of their own.
        grad_bytes: finished gradients, from the end of backward to `zero_grad`.
        moments_bytes: what the optimizer keeps after its first step.
        transient_bytes: the most ever held at once beside these: gathered weights, unreduced gradients, receive
            buffers, weights kept between forward and backward.
    """

    weight_bytes: int
    master_bytes: int
    grad_bytes: int
    moments_bytes: int
    transient_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.master_bytes + self.grad_bytes + self.moments_bytes + self.transient_bytes

    def table(self) -> str:
        rows = {
            "weights": self.weight_bytes,
            "master weights": self.master_bytes,
            "gradients": self.grad_bytes,
            "optimizer state": self.moments_bytes,
            "transient peak": self.transient_bytes,
            "total": self.total_bytes,
        }
        return "\n".join(f"  {name:<16}{value / 2**20:>12,.1f} MiB" for name, value in rows.items())


def memory_bill(
    units: Sequence[Unit],
    templates: Sequence[Mapping[str, StateSpec]],
    prefetch: int,
    micro_batches: int,
    local_sums: bool,
) -> MemoryBill:
    """The bill of these units, whether or not they have been built.

    Args:
        units: in registration order.
        templates: `state_of` each param group; none without an optimizer.
        prefetch: units gathered ahead.
        micro_batches: in a step.
        local_sums: whether those before the last only add their gradients on this rank.
    """
    buckets = [bucket for unit in units for bucket in unit.buckets]
    trainable = [bucket for bucket in buckets if bucket.trainable]
    precision = buckets[0].recipe.precision
    return MemoryBill(
        weight_bytes=sum(_numel(b, b.weight_axes) * b.weight_dtype.itemsize for b in buckets),
        master_bytes=sum(_numel(b, b.optim_axes) * precision.master.itemsize for b in trainable if b.has_own_master),
        grad_bytes=sum(_numel(b, b.optim_axes) * precision.accumulate.itemsize for b in trainable),
        moments_bytes=_moments_bytes(trainable, templates) if templates else 0,
        transient_bytes=rehearse(units, prefetch, micro_batches, local_sums)[0].peak_bytes,
    )


def _numel(bucket: Bucket, axes: tuple[str, ...]) -> int:
    return bucket.space.range(axes).numel


def _moments_bytes(buckets: Sequence[Bucket], templates: Sequence[Mapping[str, StateSpec]]) -> int:
    total = 0
    for bucket in buckets:
        moment_bytes = bucket.recipe.precision.moments.itemsize
        for first, last in runs(bucket):
            group, numel = bucket.members[first].group, held_range(bucket, first, last).numel
            for spec in templates[group].values() if group >= 0 and numel else ():
                total += numel * moment_bytes if spec.per_element else spec.fixed_bytes
    return total
