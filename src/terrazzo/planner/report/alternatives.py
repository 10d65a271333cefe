"""One run under every strategy: what the picture of memory compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from terrazzo.engine import Plan
from terrazzo.engine.plan.place import ROWS
from terrazzo.errors import BadInput
from terrazzo.planner.machine.mesh import Mesh
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.setup.setup import Setup

__all__ = ["alternatives"]


def alternatives(chosen: Estimate, estimate: Callable[[Setup], Estimate]) -> list[Estimate]:
    """`chosen` among the plans of the table that are possible on its devices, all else being equal; with nothing to
    split all of them are one.
    """
    others, own = [], chosen.setup.plan
    row = None if own.offloaded else own.row
    for name in ROWS if chosen.setup.mesh.data_ranks > 1 else (row or ROWS[0],):
        if name == row:
            others.append(chosen)
            continue
        plan = Plan.named(name)
        mesh = _mesh(chosen.setup, plan)
        if plan.groups and mesh.shard_ranks == 1:  # nothing would be split
            continue
        try:
            others.append(estimate(replace(chosen.setup, plan=plan, mesh=mesh)))
        except BadInput:
            continue
    return others if chosen in others else [*others, chosen]


def _mesh(setup: Setup, plan: Plan) -> Mesh:
    """Data ranks in one group, or for the hybrid strategies in groups that need no network.

    Groups that train by themselves stay: under another strategy they would be another run.
    """
    mesh = setup.mesh
    if setup.diloco is not None:
        return mesh
    if not plan.groups:
        return replace(mesh, dp_replicate=1, dp_shard=mesh.batch_ranks)
    return mesh if mesh.dp_replicate > 1 else mesh.in_domains(setup.cluster.device.near_ranks)
