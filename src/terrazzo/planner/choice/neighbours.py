"""What a walk of coarse steps leaves out between and beyond them, to be tried of the best that it finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from terrazzo.planner.choice.candidates import modes_and_sizes
from terrazzo.planner.choice.ranking import rank_key, tokens_per_s
from terrazzo.planner.choice.tried_meshes import possible_experts, tried_experts
from terrazzo.planner.report.estimates import Estimate
from terrazzo.planner.setup.build_setup import request_of
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup

__all__ = ["beyond", "neighbours", "steps_beyond"]

AHEAD = 8
"""How many of those that came first on one number of devices have their neighbours tried."""

AXES = ("tp", "pp", "cp", "ep")

TRIED_CHUNKS = (2, 4)
"""Stages of a rank that are tried beside one."""


def neighbours(request: Request, found: Sequence[Estimate]) -> Iterator[Request]:
    """What differs in one choice from the best that was found on one number of devices, each once.

    Of what is faster than the first, but does not surely fit, what may hold less: other groups of ranks.
    """
    ranked = _one_of_each_mode(sorted(found, key=rank_key(request)))
    ahead = ranked[:AHEAD]
    best = max(map(tokens_per_s, ahead), default=0.0)
    too_full = [each for each in ranked if each.memory.fits_surely is False and tokens_per_s(each) > best]
    others = [_of_one(request, each, schedules=_without_bubble(each) >= best) for each in ahead]
    others += [_other_groups(request, each.setup) for each in sorted(too_full, key=tokens_per_s)[-AHEAD:]]
    tried: list[Request] = []
    for neighbour in chain.from_iterable(others):
        if neighbour not in tried:
            tried.append(neighbour)
            yield neighbour


def steps_beyond(request: Request, found: Estimate, tried: Sequence[Request]) -> Iterator[Request]:
    """Twice as many ranks along each axis, stages and sequences of a micro-batch, where that is more than is tried.

    No more sequences where memory is not known, or not all of it is counted: they would fit without end.

    Args:
        tried: the meshes that are tried with everything. What comes of a mesh beside them has its micro-batch open.
    """
    best = found.setup
    chosen = request_of(request, best)
    if (
        _leaves_sequences_open(request)
        and found.memory.fits_surely is not None
        and best.micro_batch >= _most_sequences(request)
    ):
        yield replace(chosen, micro_batch=2 * best.micro_batch)
    if not request.parallel:
        return
    if request.virtual_stages is None and best.virtual_stages >= TRIED_CHUNKS[-1]:
        yield replace(chosen, virtual_stages=2 * best.virtual_stages)
    known = {tuple(getattr(each, axis) or 1 for axis in AXES) for each in tried}
    sizes = tuple(getattr(best.mesh, axis) for axis in AXES)
    shared = max(experts for *_, experts in known)  # up to here `_other_experts` has every size
    again = replace(chosen, micro_batch=request.micro_batch, dp_replicate=request.dp_replicate)
    for place, axis in enumerate(AXES):
        doubled = (*sizes[:place], 2 * sizes[place], *sizes[place + 1 :])
        within = doubled in known or (axis == "ep" and doubled[place] <= shared)
        if getattr(request, axis) is None and not within:
            wider: dict[str, Any] = {axis: doubled[place]}
            yield replace(again, **wider)


def beyond(request: Request, best: Setup, tried: Sequence[Request]) -> tuple[str, ...]:
    """What of the best is more than is tried of every plan, each with its option."""
    ranks = {axis: (getattr(best.mesh, axis), max(getattr(each, axis) or 1 for each in tried)) for axis in AXES}
    more = [f"{axis} {size} (--{axis})" for axis, (size, most) in ranks.items() if size > most]
    if best.virtual_stages > max(TRIED_CHUNKS[-1], request.virtual_stages or 1):
        more.append(f"{best.virtual_stages} stages of a rank (--virtual-stages)")
    if _leaves_sequences_open(request) and best.micro_batch > _most_sequences(request):
        more.append(f"micro-batch {best.micro_batch} (--micro-batch)")
    return tuple(more)


def _leaves_sequences_open(request: Request) -> bool:
    """Whether a micro-batch may have any number of sequences, since no batch says which divide it."""
    return request.micro_batch is None and request.global_batch is None


def _most_sequences(request: Request) -> int:
    return modes_and_sizes(replace(request, micro_batch=None)).sizes[-1]


def _one_of_each_mode(ranked: Sequence[Estimate]) -> list[Estimate]:
    """The first of each strategy, mesh and checkpointing mode: others of it have worse micro-batches."""
    first: dict[tuple[object, ...], Estimate] = {}
    for each in ranked:
        setup = each.setup
        first.setdefault((setup.plan.name, setup.mesh, setup.context, setup.checkpointing), each)
    return list(first.values())


def _of_one(request: Request, estimate: Estimate, schedules: bool) -> Iterator[Request]:
    """Micro-batches half as large again, where no batch says which divide it; and with `request.parallel` other groups
    of ranks and, if `schedules`, other schedules.
    """
    setup = estimate.setup
    if _leaves_sequences_open(request) and setup.micro_batch % 2 == 0:
        yield replace(request_of(request, setup), micro_batch=setup.micro_batch // 2 * 3)
    yield from _other_groups(request, setup)
    if schedules and request.parallel and setup.mesh.pp > 1 and not setup.as_megatron:
        yield from _other_schedules(request, setup)


def _other_groups(request: Request, setup: Setup) -> Iterator[Request]:
    """With `request.parallel` more and fewer ranks that share experts; shard groups of half as many and of twice."""
    mesh = setup.mesh
    if request.parallel and request.ep is None:
        for size in _other_experts(setup):
            yield replace(request_of(request, setup), ep=size)
    if request.parallel and setup.plan.groups and request.dp_replicate is None:
        for groups in (mesh.dp_replicate * 2, mesh.dp_replicate // 2):
            if groups > 1 and mesh.batch_ranks % groups == 0 and mesh.batch_ranks // groups * mesh.cp > 1:
                yield replace(request_of(request, setup), dp_replicate=groups)


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


def _other_schedules(request: Request, setup: Setup) -> Iterator[Request]:
    """Schedules that wait less than `1f1b`. `gpipe` waits as long and holds more, so that it is never tried."""
    if request.pipeline is None and (request.virtual_stages or 1) == 1:
        yield replace(request_of(request, setup), pipeline="zero_bubble")
    if request.virtual_stages is None and request.pipeline in (None, "1f1b"):
        for chunks in TRIED_CHUNKS:
            if setup.mesh.pp * chunks <= setup.model.layers:
                yield replace(request_of(request, setup), virtual_stages=chunks)


def _without_bubble(estimate: Estimate) -> float:
    """Tokens per second if no stage waited for another; 0 where no time is known."""
    if estimate.time is None:
        return 0.0
    idle = sum(term.value for term in estimate.time.terms if term.formula == "time.bubble")
    return tokens_per_s(estimate) * estimate.time.step_s / (estimate.time.step_s - idle)
