"""What a sharded model is, as text."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.engine.buckets.unit import Unit
from terrazzo.engine.plan.sharding_spec import ShardingSpec

__all__ = ["described"]


def described(sharding: ShardingSpec, units: Sequence[Unit], why: str) -> str:
    """The plan's places, the dtypes and the units.

    Args:
        why: how the units were found.
    """
    axes, plan = sharding.axes, sharding.mesh_plan
    named = (*axes.data, *axes.same_data, *(("ep",) if axes.has_experts else ()))
    sizes = ", ".join(f"{axis} {axes.along(axis).size}" for axis in named)
    lines = [f"plan {plan.name} on {sizes} ({axes.device})"]
    lines += [f"  {state:<8}{place!s:<24}" for state, place in plan.places().items()]
    if sharding.diloco is not None:
        replicas, settings = axes.size(axes.replica_axis), sharding.diloco
        lines.append(
            f"replicas: {replicas} (dp_replicate) train by themselves, outer step every {settings.sync_every} steps, "
            f"lr {settings.lr:g}, momentum {settings.momentum:g}, in {settings.traffic}"
        )
        if settings.streams:
            lines.append(
                f"  {settings.fragments} fragments take it by turns, {settings.delay} steps behind, of which replicas "
                f"keep {settings.kept:g} of their own weights, and meet every {settings.round_steps} steps"
            )
    lines += [f"precision: {sharding.precision}", f"{len(units)} units ({why}):"]
    lines += [f"  {unit.name or '(root)':<40}{unit.numel:>16,} elements{_elsewhere(unit)}" for unit in units]
    return "\n".join(line.rstrip() for line in lines)


def _elsewhere(unit: Unit) -> str:
    """Tiers of a unit's states that are not on the device."""
    tiers = unit.buckets[0].spec.tiers._asdict()
    return "".join(f"  {state}@{tier}" for state, tier in tiers.items() if tier != "device")
