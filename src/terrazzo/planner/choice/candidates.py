"""What a search tries: meshes, strategies, activation checkpointing and micro-batches that a request leaves open."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from terrazzo.engine import Plan
from terrazzo.engine.plan.place import ROWS
from terrazzo.parallel import MODES, Mode
from terrazzo.parallel.sharing_rules import computes_windows, shares_heads
from terrazzo.planner.model.adapters import trained
from terrazzo.planner.model.shapes import ModelShape
from terrazzo.planner.setup.build_setup import CONTEXT, build_cluster, request_of, sequence_of, shape_of
from terrazzo.planner.setup.checks import shares_all_heads
from terrazzo.planner.setup.choice_names import TRIED_MODES
from terrazzo.planner.setup.request import Request
from terrazzo.planner.setup.setup import Setup

__all__ = [
    "is_round",
    "meshes",
    "model_parallel",
    "modes_and_sizes",
    "offloaded_strategies",
    "strategies",
    "variants",
]

BESIDE_MODEL_PARALLEL = ("zero1", "zero3", "hybrid_shard")
"""Under tensor or pipeline parallelism: the distributed optimizer, and full sharding within and without groups."""

IN_STAGES = ("zero1", "zero3")
"""What is tried in a pipeline: split weights are gathered for each micro-batch, within a group as well as over all
ranks, so that more stages serve better than groups."""

OFFLOADED = ("zero2@cpu", "zero3@cpu", "zero3@cpu-all", "zero3@nvme", "zero3@nvme-all")
MOST_SEQUENCES, MOST_TOKENS = 64, 65_536
"""Of a micro-batch where no global batch is given: what is tried goes to the larger of the two, as far as it fits."""

LARGEST_SIZE = 4096
"""Sequences in a micro-batch of a global batch, far above what memory holds."""

LONG_SEQUENCE = 16_384
"""Tokens from which on context parallelism is tried; of shorter sequences where there are fewer than data ranks."""

MOST_STAGES, MOST_EXPERT = 32, 64
MOST_CONTEXT = 8
"""Ranks along cp that are tried of sequences that are not longer than as many times `LONG_SEQUENCE`."""

ROOM_TIMES = 4
"""How many times the tensor and pipeline ranks that hold weights and gradients are tried at most; more only adds
communication and bubbles."""

TRIED_CHUNKS = (2, 4)
"""Stages of a rank that are tried beside one."""

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


def variants(request: Request, setup: Setup, schedules: bool) -> Iterator[Request]:
    """Other ways of running what was found to be good, which leave its ranks and memory nearly as they are.

    Micro-batches half as large again, where no batch says which divide it; and with `request.parallel` larger and
    smaller shard groups than those of one host, more and fewer ranks that share experts, and schedules that wait less
    than `1f1b`. `gpipe` waits as long as `1f1b` and holds more, so that it is never tried.

    Args:
        request: what was asked; setup: what was found for it.
        schedules: whether to try these.
    """
    mesh, chosen = setup.mesh, request_of(request, setup)
    if request.micro_batch is None and request.global_batch is None and setup.micro_batch % 2 == 0:
        yield replace(chosen, micro_batch=setup.micro_batch // 2 * 3)
    if not request.parallel:
        return
    if request.ep is None:
        for size in _other_experts(setup):
            yield replace(chosen, ep=size)
    if schedules and mesh.pp > 1 and not setup.as_megatron:
        if request.pipeline is None and (request.virtual_stages or 1) == 1:
            yield replace(chosen, pipeline="zero_bubble")
        if request.virtual_stages is None and request.pipeline in (None, "1f1b"):
            for chunks in TRIED_CHUNKS:
                if mesh.pp * chunks <= setup.model.layers:
                    yield replace(chosen, virtual_stages=chunks)
    if setup.plan.groups and request.dp_replicate is None:
        for groups in (mesh.dp_replicate * 2, mesh.dp_replicate // 2):
            if groups > 1 and mesh.batch_ranks % groups == 0 and mesh.batch_ranks // groups * mesh.cp > 1:
                yield replace(chosen, dp_replicate=groups)


def strategies(request: Request) -> tuple[Plan, ...]:
    """The strategies to try on one mesh."""
    if request.plan is not None:
        return (request.plan,)
    if (request.pp or 1) > 1:
        return _different(request, IN_STAGES)
    return _different(request, BESIDE_MODEL_PARALLEL if model_parallel(request) else ROWS)


def offloaded_strategies(request: Request) -> tuple[Plan, ...]:
    """Strategies with states elsewhere to try on one mesh."""
    return _different(request, OFFLOADED)


def _different(request: Request, names: Sequence[str]) -> tuple[Plan, ...]:
    """The plans of these names. With one rank for all data, which has all of every state, of those that are then the
    same the first.
    """
    assert isinstance(request.gpus, int)
    named = tuple(map(Plan.named, names))
    if request.gpus > (request.tp or 1) * (request.pp or 1):
        return named
    return tuple({tuple(plan.over(()).places().values()): plan for plan in reversed(named)}.values())[::-1]


def model_parallel(request: Request) -> bool:
    """Whether its mesh has more than data axes."""
    return any((getattr(request, axis) or 1) > 1 for axis in ("tp", "pp", "cp", "ep"))


class ModesAndSizes(NamedTuple):
    """Checkpointing modes, and sequences per micro-batch."""

    modes: tuple[str, ...]
    sizes: tuple[int, ...]


def modes_and_sizes(request: Request) -> ModesAndSizes:
    """The checkpointing modes and micro-batches to try under one strategy."""
    modes = (request.checkpointing,) if request.checkpointing else TRIED_MODES
    if request.micro_batch:
        return ModesAndSizes(modes, (request.micro_batch,))
    if not (rows := _rows_of_a_rank(request)):
        most = max(MOST_SEQUENCES, MOST_TOKENS // max(sequence_of(request), 1))
        return ModesAndSizes(modes, _sizes(None, most))
    sizes = _sizes_of(rows)
    if request.runs_in.name != "terrazzo":  # which alone fills up a batch with empty rows
        sizes = tuple(size for size in sizes if rows % size == 0)
    return ModesAndSizes(modes, sizes)


@cache
def _sizes_of(rows: int) -> tuple[int, ...]:
    """Micro-batches that so many rows of a rank are cut into: about two up to each power of two, each the one that
    leaves the fewest empty rows, and of these the largest.
    """
    best: dict[tuple[int, bool], tuple[int, int]] = {}
    for size in range(1, min(rows, LARGEST_SIZE) + 1):
        count, power = -(-rows // size), (size - 1).bit_length()
        if size > -(-rows // count):  # a smaller one makes as many micro-batches
            continue
        upper_half = 4 * size > 3 << power
        best[power, upper_half] = min(best.get((power, upper_half), (count * size, -size)), (count * size, -size))
    return tuple(sorted(-size for _, size in best.values()))


def _rows_of_a_rank(request: Request) -> int:
    """Sequences that a data rank has of a global batch, some of them empty where it does not divide; 0 without one."""
    if request.global_batch is None:
        return 0
    assert isinstance(request.gpus, int)
    shared: int = math.prod(getattr(request, axis) or 1 for axis in ("tp", "pp", "cp"))
    return -(-request.global_batch // max(request.gpus // shared, 1))


def _most_context(request: Request, model_ranks: int) -> int:
    """The most ranks along cp that are tried: as many as serve memory, or leave no data rank without a sequence."""
    assert isinstance(request.gpus, int)
    if (long := sequence_of(request) // LONG_SEQUENCE) > 0:
        return max(MOST_CONTEXT, long)
    batch, ranks = request.global_batch, request.gpus // model_ranks
    return 1 if batch is None or batch >= ranks else min(MOST_CONTEXT, -(-ranks // batch))


def _most_model_ranks(request: Request, near: int) -> int:
    memory = build_cluster(request).device.memory_bytes
    if memory is None:
        return MOST_STAGES * near
    shape = trained(request, shape_of(request.model))
    each = FROZEN_BYTES * (shape.numel - shape.trainable_numel) + WHOLE_BYTES * shape.trainable_numel
    needed = each / memory
    least = next(size for power in range(64) if (size := 1 << power) >= needed)
    return max(near, ROOM_TIMES * least)


def _sizes(named: int | None, largest: int) -> tuple[int, ...]:
    if named is not None:
        return (named,)
    return tuple(1 << power for power in range(max(largest, 1).bit_length()))


def _axis_sizes(request: Request, named: int | None, largest: int) -> tuple[int, ...]:
    """Sizes of an axis to try: powers of two, and three times these where the devices divide into threes."""
    assert isinstance(request.gpus, int)
    if named is not None or request.gpus % 3:
        return _sizes(named, largest)
    return tuple(filter(is_round, range(1, max(largest, 1) + 1)))


def is_round(number: int) -> bool:
    """Whether it is a power of two, or three times one."""
    return number // (number & -number) in (1, 3)


def _tensor_sizes(request: Request, model: ModelShape, near: int) -> tuple[int, ...]:
    """Sizes of tp to try, up to the ranks that need no network, as far as heads can be shared."""
    if request.tp is not None or not model.blocks:
        return (request.tp or 1,)
    return tuple(size for size in _axis_sizes(request, None, near) if shares_all_heads(model, size))


def _modes(request: Request, model: ModelShape, tp: int, cp: int) -> tuple[Mode, ...]:
    """The modes of attention over shared sequences that heads and windows allow; `gather` always is one."""
    if request.context is not None or cp == 1:
        return (request.context or CONTEXT,)
    by_heads = all(shares_heads(block.heads, cp, tp) for block in model.blocks)
    slides = any(block.window is not None for block in model.blocks)
    return tuple(mode for mode in MODES if (mode != "ulysses" or by_heads) and (not slides or computes_windows(mode)))


def _expert_sizes(named: int | None, experts: int, ranks: int, near: int) -> tuple[int, ...]:
    """Sizes of ep to try: 1, as many ranks as need no network, and many, as far as they divide the experts and the
    ranks with one pp_rank.
    """
    if named is not None:
        return (named,) if ranks % named == 0 else ()
    sizes = _dividing(experts, ranks)
    return tuple(sorted({1, *(max(size for size in sizes if size <= most) for most in (near, MOST_EXPERT))}))


def _dividing(experts: int, ranks: int) -> tuple[int, ...]:
    """How many of the ranks with one pp_rank can share the experts."""
    common = math.gcd(experts, ranks) if experts else 1
    return tuple(size for size in range(1, min(common, MOST_EXPERT) + 1) if common % size == 0)


def _other_experts(setup: Setup) -> Iterator[int]:
    """One size of `ep` more and one less of those that `meshes` leaves out."""
    mesh, experts = setup.mesh, setup.model.experts
    ranks = mesh.world_size // (mesh.tp * mesh.pp if setup.as_megatron else mesh.pp)
    sizes = _dividing(experts, ranks)
    tried = _expert_sizes(None, experts, ranks, setup.cluster.device.near_ranks)
    at = sizes.index(mesh.ep)
    for size in (*sizes[max(at - 1, 0) : at], *sizes[at + 1 : at + 2]):
        if size not in tried:
            yield size
