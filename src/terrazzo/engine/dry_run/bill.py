"""What a plan costs in memory, computed before anything is allocated.

States follow from shapes, places and dtypes, the transient peak from a dry run of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from terrazzo.engine.buckets.bucket_layout import BucketLayout
from terrazzo.engine.buckets.unit_layout import UnitLayout
from terrazzo.engine.dry_run.outer_steps import dry_run_fragments, dry_run_outer_step, under_way_bytes
from terrazzo.engine.dry_run.step import StepSpec, dry_run
from terrazzo.engine.offload.needs import disk_bytes, host_bytes, host_sum_bytes, moment_names, need_of
from terrazzo.engine.offload.options import Offload
from terrazzo.engine.optim.segments.group_runs import held_range, runs
from terrazzo.engine.optim.stock.template import Templates
from terrazzo.engine.plan.bucket_bytes import average_at_rest, resting_bytes
from terrazzo.engine.plan.bucket_memory import publishes_late
from terrazzo.engine.plan.bucket_spec import BucketSpec

__all__ = ["MemoryBill", "memory_bill"]


@dataclass(frozen=True)
class MemoryBill:
    """Bytes that the engine holds on this rank. Activations and the framework's own memory come on top.

    All but the last two lie on the device; on CPU ranks `host_bytes` come out of the same memory. Finished gradients on
    their way to another tier, two units' at most, are not in it. Before the first step it has no backward of units that
    are frozen and in front of all that is trained: that runs where an input requires gradients, see `Promise`.

    Attributes:
        weight_bytes: weights at rest; they include the master weights wherever both are one memory.
        master_bytes: master weights in memory of their own.
        grad_bytes: finished gradients, from the end of backward to `zero_grad`.
        moments_bytes: what the optimizer keeps after its first step.
        transient_bytes: the most ever held at once beside these: gathered weights, unreduced gradients, receive
            buffers, weights kept between forward and backward; of a model in stages also copies of its buffers.
        outer_bytes: what replicas that train by themselves keep for their outer step; see `DiLoCo`.
        residual_bytes: what codes of gradients have lost, for the next ones; see `Precision.error_feedback`.
        average_bytes: the average of weights, where there is a `tz.EMA`.
        host_bytes: states in the host's memory, an average of weights too, and buffers for those on `nvme`.
        disk_bytes: states on `nvme`.
    """

    weight_bytes: int
    master_bytes: int
    grad_bytes: int
    moments_bytes: int
    transient_bytes: int
    outer_bytes: int = 0
    residual_bytes: int = 0
    average_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All bytes on the device."""
        states = self.weight_bytes + self.master_bytes + self.grad_bytes + self.moments_bytes + self.outer_bytes
        return states + self.residual_bytes + self.average_bytes + self.transient_bytes

    def table(self) -> str:
        rows = {
            "weights": self.weight_bytes,
            "master weights": self.master_bytes,
            "gradients": self.grad_bytes,
            "optimizer state": self.moments_bytes,
            **({"outer step": self.outer_bytes} if self.outer_bytes else {}),
            **({"residuals": self.residual_bytes} if self.residual_bytes else {}),
            **({"weights' average": self.average_bytes} if self.average_bytes else {}),
            "transient peak": self.transient_bytes,
            "total": self.total_bytes,
        }
        rows |= {"host memory": self.host_bytes} if self.host_bytes else {}
        rows |= {"files": self.disk_bytes} if self.disk_bytes else {}
        return "\n".join(f"  {name:<16}{value / 2**20:>12,.1f} MiB" for name, value in rows.items())


def memory_bill(
    units: Sequence[UnitLayout], templates: Templates, offload: Offload, step: StepSpec, *, averages: bool = False
) -> MemoryBill:
    """The bill of these units; a `UnitLayout` of each is enough.

    Args:
        units: in registration order.
        templates: what an `OptimizerProbe` of each param group keeps; none without an optimizer.
        offload: how states beside the device are kept.
        averages: whether there is an average of the weights.
    """
    buckets = [bucket for unit in units for bucket in unit.buckets]
    specs = [bucket.spec for bucket in buckets]
    updated_here = [each for each in buckets if each.spec.trainable and not each.spec.updated_off_device]
    need = need_of(buckets, templates, offload.cell_numel)
    resting, reduces_each = resting_bytes(specs), step.micro_batches > 1 and not step.local_sums
    summed_bytes = sum(host_sum_bytes(spec) for spec in specs if spec.trainable)
    steps = [dry_run(units, step, templates)]
    if offload.step != "synchronous" and any(map(publishes_late, specs)):
        steps.append(dry_run(units, replace(step, behind_updates=True), templates))
    step_bytes, outer_bytes = (
        max(tally.ledger.peak_bytes for tally in tallies)
        for tallies in (steps, [dry_run_outer_step(units), *dry_run_fragments(units)])
    )
    on_device, on_host = _average_bytes(specs) if averages else (0, 0)
    return MemoryBill(
        weight_bytes=resting["weight"],
        master_bytes=resting["master"],
        grad_bytes=resting["grad"],
        moments_bytes=_moments_bytes(updated_here, templates) if templates else 0,
        transient_bytes=max(step_bytes + under_way_bytes(units), outer_bytes),
        outer_bytes=resting["outer"],
        residual_bytes=resting["residuals"],
        average_bytes=on_device,
        host_bytes=host_bytes(need, offload) + summed_bytes * reduces_each + on_host,
        disk_bytes=disk_bytes(need),
    )


def _average_bytes(specs: Sequence[BucketSpec]) -> tuple[int, int]:
    """Bytes of an average of the trained weights: on the device, and in host memory."""
    averages = [average_at_rest(spec) for spec in specs if spec.trainable]
    on_device, on_host = (sum(each.nbytes for each in averages if each.tier == tier) for tier in ("device", "cpu"))
    return on_device, on_host


def _moments_bytes(buckets: Sequence[BucketLayout], templates: Templates) -> int:
    total = 0
    for bucket in buckets:
        own = bucket.spec
        moment_bytes = own.precision.moments.itemsize
        if own.moments_apart:
            total += len(moment_names(bucket, templates)) * round(own.numel(own.optim_axes) * moment_bytes)
            moment_bytes = 0
        for start, stop in runs(bucket):
            group, numel = bucket.members[start].group, held_range(bucket, start, stop).numel
            for spec in templates[group].values() if group >= 0 and numel else ():
                total += round(numel * moment_bytes) if spec.per_element else spec.fixed_bytes
    return total
