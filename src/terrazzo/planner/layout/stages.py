"""How a pipeline cuts a model: which units each rank along `pp` has, and how many micro-batches wait there.

A *stage* is one of the pieces that a model is cut into, as in `parallel.pipeline`. A rank along `pp` (`pp_rank`) has as
many of them as `virtual_stages`; which one of its own is meant is the number of a *chunk*.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from terrazzo.parallel.pipeline.schedules import ActionKind, actions_of, balanced, rounds_of
from terrazzo.planner.caching import once, once_per_setup
from terrazzo.planner.model.shapes import BlockShape, TensorShape, UnitShape, line_matrices
from terrazzo.planner.setup.setup import Setup

__all__ = [
    "Cut",
    "LastTurn",
    "blocks_of_chunks",
    "cut_of",
    "in_flight",
    "last_turns",
    "saving_blocks",
    "trains_everywhere",
    "units_of_pp_rank",
    "units_on",
]


class Cut(NamedTuple):
    """How a model is cut into stages.

    Attributes:
        ranks: ranks along `pp`. `chunks`: stages of each.
        even: as many layers on each rank, as Megatron-core has it; else stages are balanced by what matrices cost, as
            the engine has it, and rank r has the stages r, ranks + r and so on.
    """

    ranks: int
    chunks: int = 1
    even: bool = False


class CountedUnit(NamedTuple):
    """Equal units that run one after the other, `number` of them."""

    unit: UnitShape
    number: int


class CountedBlock(NamedTuple):
    """Equal blocks that run one after the other, `number` of them."""

    block: BlockShape
    number: int


def cut_of(setup: Setup) -> Cut:
    """The cut of a setup's model."""
    return Cut(setup.mesh.pp, setup.virtual_stages, setup.as_megatron or not setup.model.layers)


@once
def units_of_pp_rank(units: tuple[UnitShape, ...], tied: bool, cut: Cut, pp_rank: int) -> tuple[CountedUnit, ...]:
    """The result of `units_on`, from what it depends on."""
    root, *repeated = units
    if cut.ranks == 1:
        return tuple(CountedUnit(unit, unit.count) for unit in units if unit.tensors)
    own: list[CountedUnit] = []
    tensors = _root_tensors(root, tied, cut, pp_rank)
    if tensors:
        own.append(CountedUnit(UnitShape(root.name, tensors), 1))
    row = [unit for unit in repeated for _ in range(unit.count)]
    places = [place for begin, end in _bounds(units, cut)[pp_rank :: cut.ranks] for place in range(begin, end)]
    own_blocks = [row[place - 1] for place in places if 0 < place <= len(row)]
    own += [CountedUnit(unit, len(list(equal))) for unit, equal in groupby(own_blocks)]
    return tuple(own)


@once
def _bounds(units: tuple[UnitShape, ...], cut: Cut) -> tuple[tuple[int, int], ...]:
    """The half-open interval of each stage of the embeddings, the layers, the last norm, and the head if there is one.

    Raises:
        BadInput: fewer of these than stages.
    """
    layers = sum(unit.count for unit in units[1:])
    matrices = line_matrices(units[0])
    costs = [0, *(_cost(unit.tensors) for unit in units[1:] for _ in range(unit.count)), 0]
    costs += [tensor.numel for tensor in matrices]
    if cut.even:
        share, extra = divmod(layers, cut.ranks)
        begins = [0, *(1 + rank * share + min(rank, extra) for rank in range(1, cut.ranks))]
    else:
        begins = balanced(costs, cut.ranks * cut.chunks)
    return tuple(zip(begins, [*begins[1:], len(costs)], strict=True))


def _cost(tensors: tuple[TensorShape, ...]) -> int:
    return sum(tensor.numel for tensor in tensors if len(tensor.shape) > 1)


def blocks_of_chunks(setup: Setup, pp_rank: int) -> tuple[int, ...]:
    """How many blocks each stage of a rank along pp has."""
    cut, layers = cut_of(setup), setup.model.layers
    bounds = _bounds(setup.model.units, cut)[pp_rank :: cut.ranks]
    return tuple(min(end, layers + 1) - max(begin, 1) if end > 1 else 0 for begin, end in bounds)


@once_per_setup
def units_on(setup: Setup, pp_rank: int) -> tuple[CountedUnit, ...]:
    """The units of a rank along pp, its part of the root first if it has one.

    The first rank holds the embeddings and learned positions; the last one the head and what is left, a tied head as
    a copy of its own.
    """
    return units_of_pp_rank(setup.model.units, setup.model.tied, cut_of(setup), pp_rank)


def saving_blocks(setup: Setup, pp_rank: int) -> list[CountedBlock]:
    """The blocks of a rank along pp that keep activations for their backward."""
    units = units_on(setup, pp_rank)
    return [
        CountedBlock(unit.block, number) for unit, number in units if unit.block is not None and not unit.forward_only
    ]


def trains_everywhere(setup: Setup) -> bool:
    """Whether each of the engine's stages has a parameter to train."""
    model, cut = setup.model, Cut(setup.mesh.pp * setup.virtual_stages)
    each = (units_of_pp_rank(model.units, model.tied, cut, stage) for stage in range(cut.ranks))
    return all(any(tensor.trainable for unit, _ in units for tensor in unit.tensors) for units in each)


def _root_tensors(root: UnitShape, tied: bool, cut: Cut, pp_rank: int) -> tuple[TensorShape, ...]:
    first = tuple(tensor for tensor in root.tensors if tensor.is_table)
    if tied and not cut.even:
        place = next((index for index, tensor in enumerate(first) if tensor.role == "embedding"), len(first))
        first = (
            *first[:place],
            *(replace(tensor, copies=2) for tensor in first[place : place + 1]),
            *first[place + 1 :],
        )
    if pp_rank == 0:
        return first
    if pp_rank < cut.ranks - 1:
        return ()
    head = tuple(tensor for tensor in first if tensor.role == "embedding")[:1] if tied else ()
    if not cut.even:
        head = tuple(replace(tensor, role="head") for tensor in head)
    return tuple(tensor for tensor in root.tensors if not tensor.is_table) + head


def in_flight(setup: Setup, pp_rank: int) -> float:
    """Micro-batches whose activations a rank along pp holds at once, in units of all its blocks.

    They are those that have gone forward and not back in the lists of `parallel.pipeline.schedules`, as tests compare:
    under 1F1B as many as there are ranks from this one on (arXiv 2104.04473, section 2.2), interleaved on the first
    rank 1 + (p - 1) / (p v) times as many (arXiv 2205.05198, section 4.2.3), under GPipe all (arXiv 1811.06965), under
    ZB-H1 as many as there are ranks, of which those whose backward has run keep inputs of linear maps alone (arXiv
    2401.10241).
    """
    ranks, chunks, micro_batches = setup.mesh.pp, setup.virtual_stages, setup.micro_batches
    if setup.pipeline == "gpipe" and ranks > 1:
        return float(micro_batches)
    if setup.pipeline == "zero_bubble":
        return float(min(ranks, micro_batches))
    if chunks == 1 or ranks == 1:
        return float(min(ranks - pp_rank, micro_batches))
    size = ranks if setup.as_megatron or micro_batches < ranks else rounds_of(ranks, micro_batches)
    ahead = 2 * (ranks - pp_rank - 1) + (chunks - 1) * size + 1
    return min(ahead, micro_batches * chunks) / chunks


# -- turns -----------------------------------------------------------------------------------------------------------


class LastTurn(NamedTuple):
    """The last forward, or the last backward, of one chunk in a step of the engine's stages.

    No turn before it finds as much, since what a chunk leaves stays until the step ends.

    Attributes:
        forward_before: the chunks that have run forward before it; `backward_before` likewise.
    """

    chunk: int
    is_forward: bool
    forward_before: frozenset[int]
    backward_before: frozenset[int]


def last_turns(setup: Setup, pp_rank: int) -> tuple[LastTurn, ...]:
    """The last turns of a rank along pp, in order."""
    ranks, count = setup.mesh.pp, max(setup.micro_batches, setup.mesh.pp)
    if setup.virtual_stages > 1:  # what comes in the middle of many rounds comes in four
        size = rounds_of(ranks, count)
        count = min(count, 4 * size)
    else:
        count = min(count, 2 * ranks)
    return _last_turns(setup.pipeline, ranks, setup.virtual_stages, count)[pp_rank]


@once
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
