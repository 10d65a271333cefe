"""The same run under every other strategy: what the picture of memory compares."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from terrazzo.engine import Plan
from terrazzo.errors import BadInput
from terrazzo.planner.estimate import Estimate
from terrazzo.planner.setup.setup import Mesh, Setup

__all__ = ["alternatives"]

STRATEGIES = ("zero0", "zero1", "zero2", "zero3", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "hfsdp", "hpz")
HYBRID = STRATEGIES[5:]


def alternatives(chosen: Estimate, estimate: Callable[[Setup], Estimate]) -> list[Estimate]:
    """`chosen` among the plans of the table that are possible on its devices, all else being equal."""
    found = []
    for name in STRATEGIES:
        if name == chosen.setup.plan.name:
            found.append(chosen)
            continue
        mesh = _mesh(chosen.setup, name)
        try:
            found.append(estimate(replace(chosen.setup, plan=Plan.named(name), mesh=mesh)))
        except BadInput:
            continue
    return found if chosen in found else [*found, chosen]


def _mesh(setup: Setup, name: str) -> Mesh:
    """Data ranks in one group, or for the hybrid strategies in groups that stay on a host."""
    mesh, ranks = setup.mesh, setup.mesh.data_ranks
    if name not in HYBRID:
        return replace(mesh, dp_replicate=1, dp_shard=ranks)
    if mesh.dp_replicate > 1:
        return mesh
    shard = math.gcd(ranks, max(1, setup.cluster.device.per_node // (mesh.tp * mesh.cp)))
    return replace(mesh, dp_replicate=ranks // shard, dp_shard=shard)
