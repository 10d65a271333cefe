"""What a search tries on one mesh: strategies, shard groups, activation checkpointing and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from terrazzo.engine import Plan
from terrazzo.engine.plan.place import ROWS
from terrazzo.errors import BadInput
from terrazzo.planner.setup.build_setup import build_cluster, mesh_of, sequence_of
from terrazzo.planner.setup.choice_names import TRIED_MODES
from terrazzo.planner.setup.request import Request

__all__ = ["modes_and_sizes", "offloaded_strategies", "shard_groups", "strategies"]

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


def strategies(request: Request) -> tuple[Plan, ...]:
    """The strategies to try on one mesh."""
    if request.plan is not None:
        return (request.plan,)
    if (request.pp or 1) > 1:
        return _different(request, IN_STAGES)
    return _different(request, BESIDE_MODEL_PARALLEL if _model_parallel(request) else ROWS)


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


def _model_parallel(request: Request) -> bool:
    """Whether its mesh has more than data axes."""
    return any((getattr(request, axis) or 1) > 1 for axis in ("tp", "pp", "cp", "ep"))


def shard_groups(request: Request, named: bool) -> Iterator[Request]:
    """One strategy on one mesh with its usual shard groups, and, of one that has groups, with twice as many ranks in
    each, four times as many, as long as there are two: one group is what `zero3` has.

    Args:
        named: the strategy is the only one. Beside model parallelism others shard in one group where groups are small.
    """
    yield request
    assert request.plan is not None
    if not request.plan.groups or request.dp_replicate is not None or not (named or not _model_parallel(request)):
        return
    try:
        replicas = mesh_of(request, build_cluster(request), request.plan).dp_replicate
    except BadInput:  # no groups can be
        return
    while replicas % 2 == 0 and replicas > 2:
        replicas //= 2
        yield replace(request, dp_replicate=replicas)


class ModesAndSizes(NamedTuple):
    """Checkpointing modes, and sequences per micro-batch."""

    modes: tuple[str, ...]
    sizes: tuple[int, ...]


def modes_and_sizes(request: Request) -> ModesAndSizes:
    """The checkpointing modes to try under one strategy, by the time they cost, and the micro-batches, by size."""
    modes = (request.checkpointing,) if request.checkpointing else TRIED_MODES
    if request.micro_batch:
        return ModesAndSizes(modes, (request.micro_batch,))
    if not (rows := _rows_of_a_rank(request)):
        most = max(MOST_SEQUENCES, MOST_TOKENS // max(sequence_of(request), 1))
        return ModesAndSizes(modes, tuple(1 << power for power in range(most.bit_length())))
    sizes = _sizes_of(rows)
    if request.runs_in.name != "terrazzo":  # which alone fills up a batch with empty rows
        sizes = tuple(size for size in sizes if rows % size == 0)
    return ModesAndSizes(modes, sizes)


def _rows_of_a_rank(request: Request) -> int:
    """Sequences that a data rank has of a global batch, some of them empty where it does not divide; 0 without one."""
    if request.global_batch is None:
        return 0
    assert isinstance(request.gpus, int)
    shared: int = math.prod(getattr(request, axis) or 1 for axis in ("tp", "pp", "cp"))
    return -(-request.global_batch // max(request.gpus // shared, 1))


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
