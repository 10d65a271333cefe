"""What outer steps of replicas that train by themselves need for themselves: see the engine's `DiLoCo`."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.engine.mesh.family import REPLICA_AXIS
from terrazzo.engine.plan.layout import round_up
from terrazzo.planner.caching import once_per_setup
from terrazzo.planner.layout.buckets import PlannedBucket, buckets
from terrazzo.planner.layout.placement import PlannedAxis, placed_units
from terrazzo.planner.machine.mesh import group_of
from terrazzo.planner.setup.setup import Setup

__all__ = ["outer_fragments", "outer_held_bytes", "outer_numel", "outer_units", "under_way_bytes"]

_Trained = Sequence[PlannedBucket]


@once_per_setup
def outer_units(setup: Setup, pp_rank: int) -> tuple[_Trained, ...]:
    """What rank `pp_rank` along pp takes outer steps of, by unit; none where there are no outer steps."""
    rows = ((buckets(unit, own), count) for unit, count, own in placed_units(setup, pp_rank))
    trained = (([bucket for bucket in row if bucket.outer_states], count) for row, count in rows)
    return tuple(unit for unit, count in trained if unit for _ in range(count))


def outer_fragments(setup: Setup, pp_rank: int) -> list[Sequence[_Trained]]:
    """The units of each fragment; none where replicas do not stream."""
    settings, units = setup.diloco, outer_units(setup, pp_rank)
    return settings.cut(units) if units and settings is not None and settings.streams else []


def outer_numel(units: Sequence[_Trained]) -> int:
    """Elements of which a rank exchanges outer gradients."""
    return sum(bucket.numel(bucket.outer_axes) for unit in units for bucket in unit)


def outer_held_bytes(setup: Setup, pp_rank: int) -> float:
    """Memory on the device: one message of outer gradients, what arrives of it, and what its step takes."""
    settings, units = setup.diloco, outer_units(setup, pp_rank)
    if settings is None or not units:
        return 0.0
    numels = settings.messages(outer_numel(units))[:1]
    numels += [outer_numel(fragment) for fragment in outer_fragments(setup, pp_rank)]
    return float(max(*(_exchange_bytes(setup, numel) for numel in numels), _apart_bytes(units)))


def under_way_bytes(setup: Setup, pp_rank: int) -> float:
    """The same of an exchange that is under way while steps are taken, at most, or ended and waits for its step."""
    if setup.diloco is None or not setup.diloco.delay:
        return 0.0
    fragments = outer_fragments(setup, pp_rank)
    return max((_exchange_bytes(setup, outer_numel(fragment)) for fragment in fragments), default=0.0)


def _exchange_bytes(setup: Setup, numel: int) -> float:
    settings, device, replicas = setup.diloco, setup.cluster.device, setup.mesh.dp_replicate
    assert settings is not None, "outer steps have settings"
    nbytes = settings.held_bytes(numel, replicas, device.kind)
    if settings.traffic == "fp32" and replicas > 1:
        host = device.per_node if device.kind == "cpu" else 0
        axis = PlannedAxis.of(group_of(setup.mesh, REPLICA_AXIS), host)
        nbytes += axis.receive_bytes(round_up(numel, replicas) * 4)
    return float(nbytes)


def _apart_bytes(units: Sequence[_Trained]) -> int:
    """Bytes of a bucket's master weights, where they are gathered in device memory of their own."""
    apart = (each for unit in units for each in unit if each.outer_gathers_apart)
    return max((4 * each.numel(each.optim_axes) for each in apart), default=0)
