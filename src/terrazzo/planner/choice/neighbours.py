"""What a walk of coarse steps leaves out beside the best that it finds, to be tried at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from terrazzo.planner.choice.ranking import rank_key, tokens_per_s
from terrazzo.planner.choice.tried_meshes import possible_experts, tried_experts
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.setup.build_setup import request_of
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup

__all__ = ["neighbours"]

AHEAD = 8
"""How many of the best that were found on one number of devices have their neighbours tried."""

TRIED_CHUNKS = (2, 4)
"""Stages of a rank that are tried beside one."""


def neighbours(request: Request, found: Sequence[Estimate]) -> Iterator[Request]:
    """What differs in one choice from the best that was found on one number of devices, each once.

    Other schedules only of those that would be the best if nothing waited in them.
    """
    ahead = sorted(found, key=rank_key(request))[:AHEAD]
    best = max(map(tokens_per_s, ahead), default=0.0)
    tried: list[Request] = []
    for each in ahead:
        for neighbour in _of_one(request, each.setup, schedules=_without_bubble(each) >= best):
            if neighbour not in tried:
                tried.append(neighbour)
                yield neighbour


def _of_one(request: Request, setup: Setup, schedules: bool) -> Iterator[Request]:
    """Micro-batches half as large again, where no batch says which divide it; and with `request.parallel` more and
    fewer ranks that share experts, other schedules if `schedules`, larger and smaller shard groups.
    """
    chosen = request_of(request, setup)
    if request.micro_batch is None and request.global_batch is None and setup.micro_batch % 2 == 0:
        yield replace(chosen, micro_batch=setup.micro_batch // 2 * 3)
    if not request.parallel:
        return
    if request.ep is None:
        for size in _other_experts(setup):
            yield replace(chosen, ep=size)
    if schedules and setup.mesh.pp > 1 and not setup.as_megatron:
        yield from _other_schedules(request, chosen, setup)
    if setup.plan.groups and request.dp_replicate is None:
        yield from _other_groups(chosen, setup)


def _other_experts(setup: Setup) -> Iterator[int]:
    """One size of `ep` more and one less of those that are not tried on every mesh."""
    mesh, experts = setup.mesh, setup.model.experts
    ranks = mesh.world_size // (mesh.tp * mesh.pp if setup.as_megatron else mesh.pp)
    possible = possible_experts(experts, ranks)
    tried = tried_experts(possible, setup.cluster.device.near_ranks)
    at = possible.index(mesh.ep)
    for size in (*possible[max(at - 1, 0) : at], *possible[at + 1 : at + 2]):
        if size not in tried:
            yield size


def _other_schedules(request: Request, chosen: Request, setup: Setup) -> Iterator[Request]:
    """Schedules that wait less than `1f1b`. `gpipe` waits as long and holds more, so that it is never tried."""
    if request.pipeline is None and (request.virtual_stages or 1) == 1:
        yield replace(chosen, pipeline="zero_bubble")
    if request.virtual_stages is None and request.pipeline in (None, "1f1b"):
        for chunks in TRIED_CHUNKS:
            if setup.mesh.pp * chunks <= setup.model.layers:
                yield replace(chosen, virtual_stages=chunks)


def _other_groups(chosen: Request, setup: Setup) -> Iterator[Request]:
    """Shard groups of half as many ranks and of twice as many."""
    mesh = setup.mesh
    for groups in (mesh.dp_replicate * 2, mesh.dp_replicate // 2):
        if groups > 1 and mesh.batch_ranks % groups == 0 and mesh.batch_ranks // groups * mesh.cp > 1:
            yield replace(chosen, dp_replicate=groups)


def _without_bubble(estimate: Estimate) -> float:
    """Tokens per second if no stage waited for another; 0 where no time is known."""
    if estimate.time is None:
        return 0.0
    idle = sum(term.value for term in estimate.time.terms if term.formula == "time.bubble")
    return tokens_per_s(estimate) * estimate.time.step_s / (estimate.time.step_s - idle)
