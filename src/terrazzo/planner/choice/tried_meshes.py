"""Which meshes a search tries: sizes of tensor, pipeline, context and expert parallelism; the rest is data parallel.

    tp    as many ranks as need no network, as far as heads can be shared
    pp    as many stages as there are layers, up to `MOST_STAGES`; with tp up to `_most_model_ranks`
    cp    of sequences that are long, or fewer than data ranks, up to `_most_context`, each in every mode of attention
    ep    1, as many ranks as need no network, and `MOST_EXPERT`, as far as they divide the experts

Sizes are powers of two, of numbers of devices that divide by three also three times these. A size that the request
names is the only one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from terrazzo.parallel import MODES, Mode
from terrazzo.parallel.sharing_rules import computes_windows, shares_heads
from terrazzo.planner.model.adapters import trained
from terrazzo.planner.model.shapes import ModelShape
from terrazzo.planner.setup.build_setup import CONTEXT, build_cluster, sequence_of, shape_of
from terrazzo.planner.setup.checks import shares_all_heads
from terrazzo.planner.setup.request import Request

__all__ = ["LONG_SEQUENCE", "is_round", "meshes", "possible_experts", "tried_experts"]

LONG_SEQUENCE = 16_384
"""Tokens from which on context parallelism is tried; of shorter sequences where there are fewer than data ranks."""

MOST_STAGES, MOST_EXPERT = 32, 64
MOST_CONTEXT = 8
"""Ranks along cp that are tried of sequences that are not longer than as many times `LONG_SEQUENCE`."""

ROOM_TIMES = 4
"""How many times the tensor and pipeline ranks that hold weights and gradients are tried at most; more only adds
communication and bubbles."""

FROZEN_BYTES, WHOLE_BYTES = 2, 6
"""Per parameter, of bf16 weights, and of these and fp32 gradients where it is trained, which zero1 keeps whole."""


def meshes(request: Request) -> Iterator[Request]:
    """The request with the sizes of tensor, pipeline, context and expert parallelism fixed."""
    if not request.parallel:
        yield request
        return
    assert isinstance(request.gpus, int)
    model, near = shape_of(request.model), build_cluster(request).device.near_ranks
    most, named = _most_model_ranks(request, near), (request.tp or 1) * (request.pp or 1)
    for tp in _tensor_sizes(request, model, near):
        for pp in _axis_sizes(request, request.pp, min(model.layers, MOST_STAGES)):
            if tp * pp > max(most, named):
                continue
            for cp in _axis_sizes(request, request.cp, _most_context(request, tp * pp)):
                if request.gpus % (tp * pp * cp) == 0:
                    ranks = request.gpus // (tp * pp if request.as_megatron else pp)
                    for ep in _expert_sizes(request.ep, model.experts, ranks, near):
                        for context in _modes(request, model, tp, cp):
                            yield replace(request, tp=tp, pp=pp, cp=cp, ep=ep, context=context)


def is_round(number: int) -> bool:
    """Whether it is a power of two, or three times one."""
    return number // (number & -number) in (1, 3)


def _axis_sizes(request: Request, named: int | None, largest: int) -> tuple[int, ...]:
    """Sizes of an axis to try: powers of two, and three times these where the devices divide into threes."""
    assert isinstance(request.gpus, int)
    if named is not None:
        return (named,)
    if request.gpus % 3:
        return tuple(1 << power for power in range(max(largest, 1).bit_length()))
    return tuple(filter(is_round, range(1, max(largest, 1) + 1)))


def _tensor_sizes(request: Request, model: ModelShape, near: int) -> tuple[int, ...]:
    """Sizes of tp to try, up to the ranks that need no network, as far as heads can be shared."""
    if request.tp is not None or not model.blocks:
        return (request.tp or 1,)
    return tuple(size for size in _axis_sizes(request, None, near) if shares_all_heads(model, size))


def _most_model_ranks(request: Request, near: int) -> int:
    """The most ranks along tp and pp together that are tried: a host's, or some times what holds the weights."""
    memory = build_cluster(request).device.memory_bytes
    if memory is None:
        return MOST_STAGES * near
    shape = trained(request, shape_of(request.model))
    each = FROZEN_BYTES * (shape.numel - shape.trainable_numel) + WHOLE_BYTES * shape.trainable_numel
    needed = each / memory
    least = next(size for power in range(64) if (size := 1 << power) >= needed)
    return max(near, ROOM_TIMES * least)


def _most_context(request: Request, model_ranks: int) -> int:
    """The most ranks along cp that are tried: as many as serve memory, or leave no data rank without a sequence."""
    assert isinstance(request.gpus, int)
    if (long := sequence_of(request) // LONG_SEQUENCE) > 0:
        return max(MOST_CONTEXT, long)
    batch, ranks = request.global_batch, request.gpus // model_ranks
    return 1 if batch is None or batch >= ranks else min(MOST_CONTEXT, -(-ranks // batch))


def _modes(request: Request, model: ModelShape, tp: int, cp: int) -> tuple[Mode, ...]:
    """The modes of attention over shared sequences that heads and windows allow; `gather` always is one."""
    if request.context is not None or cp == 1:
        return (request.context or CONTEXT,)
    by_heads = all(shares_heads(block.heads, cp, tp) for block in model.blocks)
    slides = any(block.window is not None for block in model.blocks)
    return tuple(mode for mode in MODES if (mode != "ulysses" or by_heads) and (not slides or computes_windows(mode)))


def _expert_sizes(named: int | None, experts: int, ranks: int, near: int) -> tuple[int, ...]:
    """Sizes of ep to try on so many ranks with one pp_rank."""
    if named is not None:
        return (named,) if ranks % named == 0 else ()
    return tried_experts(possible_experts(experts, ranks), near)


def possible_experts(experts: int, ranks: int) -> tuple[int, ...]:
    """How many of the ranks with one pp_rank can share the experts."""
    common = math.gcd(experts, ranks) if experts else 1
    return tuple(size for size in range(1, min(common, MOST_EXPERT) + 1) if common % size == 0)


def tried_experts(possible: tuple[int, ...], near: int) -> tuple[int, ...]:
    """Of the possible sizes of ep those that are tried on every mesh: none shares, a host does, all do."""
    return tuple(sorted({1, *(max(size for size in possible if size <= most) for most in (near, MOST_EXPERT))}))
