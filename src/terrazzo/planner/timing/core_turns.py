"""What a step takes, with the turns that ranks take where a host has fewer cores than ranks."""

from __future__ import annotations

from terrazzo.planner.figures import Formula, Term
from terrazzo.planner.layout.placement import stand_ins
from terrazzo.planner.timing.pipeline_rank import PipelineRank

__all__ = ["FORMULAS", "step_terms"]

FORMULAS = {
    "time.turns": Formula(
        "max(0, work_s / cores - alone_s); work_s of all ranks of a host, what they compute and hand on",
        "python -m benchmarks.planner.ranking",
    ),
}


def step_terms(slowest: PipelineRank) -> list[Term]:
    """The terms of the slowest rank along pp, and what the step takes longer where ranks take turns."""
    terms = slowest.terms()
    return [*terms, *_turns(slowest, sum(term.value for term in terms))]


def _turns(slowest: PipelineRank, alone_s: float) -> list[Term]:
    """What a step takes longer than the `alone_s` of its slowest rank. All ranks compute at that rank's pace."""
    setup = slowest.setup
    host, ranks = setup.cluster.device.measured, setup.cluster.ranks_per_host
    if host is None or (cores := host.cores) is None or ranks <= cores:
        return []
    made = {pp_rank: slowest.beside(pp_rank) for pp_rank in set(stand_ins(setup))}
    work_s = sum(made[pp_rank].work_s for pp_rank in stand_ins(setup)) / setup.mesh.pp * ranks
    value = max(0.0, work_s / cores - alone_s)
    inputs = {"work_s": work_s, "cores": float(cores), "alone_s": alone_s}
    return [Term("turns on shared cores", value, value, "time.turns", inputs, "s")] if value else []
