"""The order in which a search shows what fits: by what is asked to come first, and of what is alike the simplest."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.setup.choice_names import TRIED_MODES
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup

__all__ = ["NOISE", "pareto", "rank_key", "simplest_first", "tokens_per_s"]

NOISE = 0.03
"""Share of tokens per second: setups whose predictions differ by less count as equally fast."""


def rank_key(request: Request) -> Callable[[Estimate], tuple[float, ...]]:
    """The key to sort by: what surely fits comes first, of that what runs now, and of that what `rank_by` names.

    Where no time is known, that is what computes least a second time, and of that what sends fewest bytes per token.
    """

    def key(estimate: Estimate) -> tuple[float, ...]:
        count, memory = estimate.setup.cluster.count, estimate.memory.near_bytes
        behind = (float(estimate.memory.fits_surely is False), float(not estimate.runs_now))
        fewest = (count,) if request.rank_by == "gpus" else ()
        return (*behind, *fewest, *_slowness(estimate, alone=request.rank_by != "throughput"), count, memory)

    return key


def _slowness(estimate: Estimate, alone: bool) -> tuple[float, float, float]:
    """Least for what is fastest, of one device if `alone`; what has no time comes behind what has one."""
    count = estimate.setup.cluster.count
    if estimate.time is not None:
        return (0.0, -estimate.time.tokens_per_s_per_gpu * (1 if alone else count), 0.0)
    tokens = estimate.setup.global_batch * estimate.setup.sequence or 1
    return (1.0, _again(estimate.setup), estimate.traffic.total_bytes * count / tokens)


def simplest_first(ranked: list[Estimate]) -> tuple[Estimate, ...]:
    """The estimates in their order, but the simplest first of those on as many devices that are as fast as the first,
    within what predictions can tell apart.
    """
    if not ranked or ranked[0].time is None:
        return tuple(ranked)
    first = ranked[0]
    alike = [
        each
        for each in ranked
        if each.setup.cluster.count == first.setup.cluster.count
        and each.memory.fits_surely == first.memory.fits_surely
        and each.runs_now == first.runs_now
        and tokens_per_s(each) >= (1 - NOISE) * tokens_per_s(first)
    ]
    simplest = min(alike, key=_complexity)
    return (simplest, *(each for each in ranked if each is not simplest))


def _complexity(estimate: Estimate) -> tuple[int, ...]:
    """What there is to set up and to understand of a setup: states elsewhere, kinds of parallelism, groups of ranks,
    schedules, and activations that are computed twice.
    """
    setup, mesh = estimate.setup, estimate.setup.mesh
    axes = sum(size > 1 for size in (mesh.tp, mesh.pp, mesh.cp, mesh.ep))
    schedule = mesh.pp > 1 and (setup.pipeline != "1f1b" or setup.virtual_stages > 1)
    return (setup.plan.offloaded, axes, setup.plan.groups, schedule, _again(setup))


def _again(setup: Setup) -> int:
    """How much is computed a second time, as a place in the order of modes."""
    return TRIED_MODES.index(setup.checkpointing) if setup.checkpointing in TRIED_MODES else 1


def pareto(ranked: tuple[Estimate, ...]) -> tuple[Estimate, ...]:
    """What no other beats in both memory and tokens per second, by memory."""
    front: list[Estimate] = []
    for each in sorted(ranked, key=lambda each: (each.memory.near_bytes, -tokens_per_s(each))):
        if not front or tokens_per_s(each) > tokens_per_s(front[-1]):
            front.append(each)
    return tuple(front)


def tokens_per_s(estimate: Estimate) -> float:
    """Tokens per second of all devices; 0 where no time is known."""
    return estimate.time.tokens_per_s_per_gpu * estimate.setup.cluster.count if estimate.time else 0.0
