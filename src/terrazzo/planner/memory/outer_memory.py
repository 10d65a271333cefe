"""What an outer step of replicas that train by themselves needs for itself: see the engine's `DiLoCo`."""

from __future__ import annotations

from terrazzo.engine.mesh.family import REPLICA_AXIS
from terrazzo.engine.plan.layout import round_up
from terrazzo.planner.layout.buckets import buckets
from terrazzo.planner.layout.placement import PlannedAxis, placed_units
from terrazzo.planner.machine.mesh import group_of
from terrazzo.planner.setup.setup import Setup

__all__ = ["outer_held_bytes", "outer_numel"]


def outer_numel(setup: Setup, pp_rank: int) -> int:
    """Elements whose outer gradients rank `pp_rank` along pp exchanges; 0 where there are no outer steps."""
    if setup.diloco is None:
        return 0
    counted = ((bucket, count) for unit, count, own in placed_units(setup, pp_rank) for bucket in buckets(unit, own))
    return sum(count * bucket.numel(bucket.outer_axes) for bucket, count in counted if bucket.outer_states)


def outer_held_bytes(setup: Setup, pp_rank: int) -> float:
    """Memory on the device: one message of outer gradients, what arrives of it, and what its step takes."""
    settings, numel = setup.diloco, outer_numel(setup, pp_rank)
    if settings is None or not numel:
        return 0.0
    device, replicas = setup.cluster.device, setup.mesh.dp_replicate
    (message, *_) = settings.messages(numel)
    nbytes = settings.held_bytes(message, replicas, device.kind)
    if settings.traffic == "fp32" and replicas > 1:
        host = device.per_node if device.kind == "cpu" else 0
        near = host and max(1, min(replicas, host // group_of(setup.mesh, REPLICA_AXIS).stride))
        nbytes += PlannedAxis(replicas, near).receive_bytes(round_up(message, replicas) * 4)
    return float(max(nbytes, _apart_bytes(setup, pp_rank)))


def _apart_bytes(setup: Setup, pp_rank: int) -> int:
    """Bytes of a bucket's master weights, where they are gathered in device memory of their own."""
    own_buckets = (bucket for unit, _, own in placed_units(setup, pp_rank) for bucket in buckets(unit, own))
    apart = (each for each in own_buckets if each.outer_states and each.outer_gathers_apart)
    return max((4 * each.numel(each.optim_axes) for each in apart), default=0)
