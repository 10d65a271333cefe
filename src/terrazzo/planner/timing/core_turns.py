"""What a step takes, with the turns that ranks take where a host has fewer cores than ranks."""

from __future__ import annotations

from terrazzo.planner.figures import Formula, Term
from terrazzo.planner.timing.pipeline_step import PipelineStep

__all__ = ["FORMULAS", "step_terms"]

FORMULAS = {
    "time.turns": Formula(
        "max(0, work_s / cores - alone_s); work_s of all ranks of a host, what they compute and hand on",
        "python -m benchmarks.planner.ranking",
    ),
}


def step_terms(step: PipelineStep) -> list[Term]:
    """The terms of the ranks along pp, and what the step takes longer where ranks take turns."""
    terms = step.terms()
    return [*terms, *_turns(step, sum(term.value for term in terms))]


def _turns(step: PipelineStep, alone_s: float) -> list[Term]:
    """What a step takes longer than the `alone_s` of ranks with a core each."""
    cluster = step.setup.cluster
    host, ranks = cluster.device.measured, cluster.ranks_per_host
    if host is None or (cores := host.cores) is None or ranks <= cores:
        return []
    work_s = sum(rank.work_s for rank in step.ranks) / len(step.ranks) * ranks
    value = max(0.0, work_s / cores - alone_s)
    inputs = {"work_s": work_s, "cores": float(cores), "alone_s": alone_s}
    return [Term.seconds("turns on shared cores", value, "time.turns", **inputs)] if value else []
