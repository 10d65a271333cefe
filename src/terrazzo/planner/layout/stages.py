"""Pipeline stages: which units the ranks of each hold, how many micro-batches wait on it for their backward, and what
their last turns find.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from terrazzo.parallel.pipeline.schedules import ActionKind, actions_of, balanced, rounds_of
from terrazzo.planner.model.shapes import BlockShape, TensorShape, UnitShape
from terrazzo.planner.setup.setup import Setup, once_per_setup

__all__ = [
    "Cut",
    "LastTurn",
    "blocks_of_chunks",
    "cut_of",
    "in_flight",
    "last_turns",
    "saving_blocks",
    "stage_units",
    "trains_everywhere",
    "units_of_stage",
]


class Cut(NamedTuple):
    """How a model is cut into stages.

    Attributes:
        ranks: along the pipeline. `chunks`: stages of each.
        even: as many layers on each rank, as Megatron-core has it; else stages are balanced by what matrices cost, as
            the engine has it, and rank r has the stages r, ranks + r and so on.
    """

    ranks: int
    chunks: int = 1
    even: bool = False


@once_per_setup
def cut_of(setup: Setup) -> Cut:
    """That of a setup."""
    return Cut(setup.mesh.pp, setup.virtual_stages, setup.as_megatron or not setup.model.layers)


@lru_cache(maxsize=4096)
def units_of_stage(units: tuple[UnitShape, ...], tied: bool, cut: Cut, rank: int) -> tuple[tuple[UnitShape, int], ...]:
    """`stage_units` of what it depends on."""
    root, blocks = units[0], units[1:]
    if cut.ranks == 1:
        return tuple((unit, unit.count) for unit in units if unit.tensors)
    own: list[tuple[UnitShape, int]] = []
    tensors = _root_tensors(root, tied, cut.even, cut.ranks, rank)
    if tensors:
        own.append((UnitShape(root.name, tensors), 1))
    row = [unit for unit in blocks for _ in range(unit.count)]
    places = [place for begin, end in _bounds(units, cut)[rank :: cut.ranks] for place in range(begin, end)]
    own_blocks = [row[place - 1] for place in places if 0 < place <= len(row)]
    own += [(unit, len(list(equal))) for unit, equal in groupby(own_blocks)]
    return tuple(own)


@lru_cache(maxsize=4096)
def _bounds(units: tuple[UnitShape, ...], cut: Cut) -> tuple[tuple[int, int], ...]:
    """The half-open interval of each stage of the embeddings, the layers, the last norm, and the head if there is one.

    Raises:
        BadInput: fewer of these than stages.
    """
    layers, matrices = (
        sum(unit.count for unit in units[1:]),
        [each for each in units[0].tensors if not each.is_table],
    )
    costs = [0, *(_cost(unit.tensors) for unit in units[1:] for _ in range(unit.count)), 0]
    costs += [tensor.numel for tensor in matrices if len(tensor.shape) > 1]
    if cut.even:
        share, extra = divmod(layers, cut.ranks)
        begins = [0, *(1 + rank * share + min(rank, extra) for rank in range(1, cut.ranks))]
    else:
        begins = balanced(costs, cut.ranks * cut.chunks)
    return tuple(zip(begins, [*begins[1:], len(costs)], strict=True))


def _cost(tensors: tuple[TensorShape, ...]) -> int:
    return sum(tensor.numel for tensor in tensors if len(tensor.shape) > 1)


def blocks_of_chunks(setup: Setup, stage: int) -> tuple[int, ...]:
    """How many blocks each chunk of a pipeline's rank has."""
    cut, layers = cut_of(setup), setup.model.layers
    bounds = _bounds(setup.model.units, cut)[stage :: cut.ranks]
    return tuple(min(end, layers + 1) - max(begin, 1) if end > 1 else 0 for begin, end in bounds)


@once_per_setup
def stage_units(setup: Setup, stage: int) -> tuple[tuple[UnitShape, int], ...]:
    """The units of a pipeline's rank with their counts, its part of the root first if it has one.

    The first rank holds the embeddings and learned positions; the last one the head and what is left, a tied head as
    a copy of its own.
    """
    return units_of_stage(setup.model.units, setup.model.tied, cut_of(setup), stage)


def saving_blocks(setup: Setup, stage: int) -> list[tuple[BlockShape, int]]:
    """What the blocks of a pipeline's rank compute, with counts, of those that keep activations for their backward."""
    units = stage_units(setup, stage)
    return [(unit.block, count) for unit, count in units if unit.block is not None and not unit.forward_only]


def trains_everywhere(setup: Setup) -> bool:
    """Whether each of the engine's stages has a parameter to train."""
    model, cut = setup.model, Cut(setup.mesh.pp * setup.virtual_stages)
    each = (units_of_stage(model.units, model.tied, cut, stage) for stage in range(cut.ranks))
    return all(any(tensor.trainable for unit, _ in units for tensor in unit.tensors) for units in each)


def _root_tensors(root: UnitShape, tied: bool, even: bool, stages: int, stage: int) -> tuple[TensorShape, ...]:
    if stages == 1:
        return root.tensors
    first = tuple(tensor for tensor in root.tensors if tensor.is_table)
    if tied and not even:
        place = next((index for index, tensor in enumerate(first) if tensor.role == "embedding"), len(first))
        first = (
            *first[:place],
            *(replace(tensor, copies=2) for tensor in first[place : place + 1]),
            *first[place + 1 :],
        )
    if stage == 0:
        return first
    if stage < stages - 1:
        return ()
    head = tuple(tensor for tensor in first if tensor.role == "embedding")[:1] if tied else ()
    if not even:
        head = tuple(replace(tensor, role="head") for tensor in head)
    return tuple(tensor for tensor in root.tensors if not tensor.is_table) + head


def in_flight(setup: Setup, stage: int) -> float:
    """Micro-batches whose activations a rank of the pipeline holds at once, in units of all its blocks.

    As many as have gone forward and not back in the lists of `parallel.pipeline.schedules`, as tests compare: of 1F1B
    as many as stages are left (arXiv 2104.04473, section 2.2), interleaved on the first stage 1 + (p - 1) / (p v) times
    as many (arXiv 2205.05198, section 4.2.3), of GPipe all (arXiv 1811.06965), of ZB-H1 as many as there are stages,
    inputs of linear maps alone of those whose backward has run (arXiv 2401.10241).
    """
    stages, chunks, micro_batches = setup.mesh.pp, setup.virtual_stages, setup.micro_batches
    if setup.pipeline == "gpipe" and stages > 1:
        return float(micro_batches)
    if setup.pipeline == "zero_bubble":
        return float(min(stages, micro_batches))
    if chunks == 1 or stages == 1:
        return float(min(stages - stage, micro_batches))
    size = stages if setup.as_megatron or micro_batches < stages else rounds_of(stages, micro_batches)
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * size + 1
    return min(ahead, micro_batches * chunks) / chunks


# -- turns -----------------------------------------------------------------------------------------------------------


class LastTurn(NamedTuple):
    """The last forward, or the last backward, of one chunk in a step of the engine's stages.

    None before it finds as much, since what a chunk leaves stays until the step ends.

    Attributes:
        forward_before: the chunks that have run forward before it; `backward_before` likewise.
    """

    chunk: int
    is_forward: bool
    forward_before: frozenset[int]
    backward_before: frozenset[int]


def last_turns(setup: Setup, stage: int) -> tuple[LastTurn, ...]:
    """Those of a pipeline's rank."""
    ranks, count = setup.mesh.pp, max(setup.micro_batches, setup.mesh.pp)
    if setup.virtual_stages > 1:  # what comes in the middle of many rounds comes in four
        size = rounds_of(ranks, count)
        count = min(count, 4 * size)
    else:
        count = min(count, 2 * ranks)
    return _last_turns(setup.pipeline, ranks, setup.virtual_stages, count)[stage]


@lru_cache(maxsize=1024)
def _last_turns(schedule: str, ranks: int, chunks: int, micro_batches: int) -> list[tuple[LastTurn, ...]]:
    turns = []
    for actions in actions_of(schedule, ranks, chunks, micro_batches):
        before: dict[bool, frozenset[int]] = {True: frozenset(), False: frozenset()}
        last: dict[tuple[int, bool], LastTurn] = {}
        for action in actions:
            if action.kind is not ActionKind.WEIGHT:
                chunk, is_forward = action.stage // ranks, action.kind is ActionKind.FORWARD
                last[chunk, is_forward] = LastTurn(chunk, is_forward, before[True], before[False])
                before[is_forward] |= {chunk}
        turns.append(tuple(last.values()))
    return turns
